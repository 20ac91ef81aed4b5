"""Matrix products with weights in every form."""
