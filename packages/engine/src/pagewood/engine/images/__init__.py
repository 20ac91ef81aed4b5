"""From the bytes of a picture to what a model's tower gets: decoded within limits, turned upright, resized.

Nothing here imports torch. What decodes needs Pillow (`pagewood-engine[images]`), and is imported where it is used.
"""
