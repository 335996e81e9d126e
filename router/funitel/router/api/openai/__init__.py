"""The OpenAI chat and completions APIs."""
