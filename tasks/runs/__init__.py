"""What a run leaves below a root: its record, its report, and the models that it made."""
