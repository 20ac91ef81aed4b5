"""The documentation that the server serves: OpenAPI, and pages that need nothing from outside."""
