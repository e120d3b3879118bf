"""Model classes for SGLang's registry (models/registry.py:148 `import_model_classes` imports every module
here).
"""
