"""OpenAI's Responses protocol: `/v1/responses`."""
