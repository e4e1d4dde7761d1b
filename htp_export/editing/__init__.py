"""Changes of a graph that keep the names of tensors: functions dissolved, parts cut out and put back."""
