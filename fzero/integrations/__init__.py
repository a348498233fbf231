"""The engine inside of training loops that others wrote. `import fzero` imports none of this.

accelerate      for Hugging Face accelerate; transformers for the trainers that are built on it
fabric          for Lightning Fabric
"""
