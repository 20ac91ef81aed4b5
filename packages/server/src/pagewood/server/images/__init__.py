"""The images of requests: where their bytes come from, before a tokenizer process decodes them."""
