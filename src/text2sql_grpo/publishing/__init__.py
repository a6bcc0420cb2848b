"""From a finished run to a model other people can load: merge, model card, Hub."""
