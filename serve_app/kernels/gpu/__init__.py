"""Triton kernels for NVIDIA GPUs, each with the signature and the meaning of its torch version.

Import the modules below through :mod:`serve_app.kernels.gpu.backend`, which checks them on the device first.
"""
