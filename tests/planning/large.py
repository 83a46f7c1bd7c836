"""Records of large models, and the configurations that they are published with."""

LARGE = {
    "@cf/meta/llama-3.3-70b-instruct-fp8-fast": "llama-3.3-70b-instruct",
    "@cf/meta/llama-4-scout-17b-16e-instruct": "llama-4-scout",
    "@cf/openai/gpt-oss-120b": "gpt-oss-120b",
    "@cf/openai/gpt-oss-20b": "gpt-oss-20b",
    "@cf/qwen/qwen3-30b-a3b-fp8": "qwen3-30b-a3b-fp8",
    "@cf/zai-org/glm-4.7-flash": "glm-4.7-flash",
    # Which is built as 5.3, and packed as 5.3 in the repository of its record.
    "@cf/zai-org/glm-5.2": "glm-5.3",
    "@cf/zai-org/glm-5.3": "glm-5.3",
    "@cf/zai-org/glm-5.3-flash": "glm-5.3-flash",
    "@cf/qwen/qwen3.8-27b": "qwen3.8-27b",
    "@cf/deepseek-ai/deepseek-v4-flash-0731": "deepseek-v4-flash",
    "@cf/deepseek-ai/deepseek-v4-pro-0813": "deepseek-v4-pro",
    "@cf/moonshotai/kimi-k2.5": "kimi-k2.5",
    # Which are built as K2.5 is, as their authors say where they tell how to deploy them.
    "@cf/moonshotai/kimi-k2.6": "kimi-k2.5",
    "@cf/moonshotai/kimi-k2.7-code": "kimi-k2.5",
    "@cf/nvidia/nemotron-3-120b-a12b": "nemotron-3-120b-a12b",
    "@cf/deepseek-ai/deepseek-r1-distill-qwen-32b": "deepseek-r1-distill-qwen-32b",
    "@cf/ibm-granite/granite-4.0-h-micro": "granite-4.0-h-micro",
    "@cf/mistralai/mistral-small-3.1-24b-instruct": "mistral-small-3.1-24b-instruct",
    "@cf/google/gemma-3-12b-it": "gemma-3-12b-it",
    "@cf/google/gemma-4-26b-a4b-it": "gemma-4-26b-a4b-it",
    # Which continues Gemma 3.
    "@cf/aisingapore/gemma-sea-lion-v4-27b-it": "gemma-3-27b-it",
}
