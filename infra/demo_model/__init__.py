"""The demo policy and its prompts: a tiny arithmetic model, trained on one CPU core."""
