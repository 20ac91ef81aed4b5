"""What plugs the engine into frameworks that have engines of their own; nothing here is imported by other rooms."""
