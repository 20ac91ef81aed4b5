"""What all compiled functions are made of: compilation, memory by address, vectors, arithmetic."""
