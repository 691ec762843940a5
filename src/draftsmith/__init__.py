"""draftsmith: makes a DFlash drafter for a language model that you already serve, and proves each
step.
"""

__version__ = "0.1.0"
