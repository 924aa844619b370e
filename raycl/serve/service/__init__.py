"""The service of one replica: what opens it, answers and reports its metrics, without HTTP."""
