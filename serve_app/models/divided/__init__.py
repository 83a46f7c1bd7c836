"""One rank's part of a model: transformers' own modules with some of their heads, columns or layers."""
