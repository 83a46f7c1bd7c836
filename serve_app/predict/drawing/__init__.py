"""Pictures by pipelines of diffusers, which is installed with the extra `images` alone."""
