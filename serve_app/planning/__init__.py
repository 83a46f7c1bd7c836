"""What a model needs before anything of it is loaded: from its configuration and the headers of its files to bytes per
rank, tokens that fit, and expected rates. Reads no weights.
"""
