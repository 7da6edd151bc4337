"""Host frameworks, one module each; nothing here is imported by the rest of the package."""
