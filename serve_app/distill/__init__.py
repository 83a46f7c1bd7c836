"""``serve-app train-draft``: draft models and EAGLE-3 heads, taught by the model they will draft for."""
