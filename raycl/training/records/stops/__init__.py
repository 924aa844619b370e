"""Files of a run that stop it: a request from outside (`request`), and the decision of a sweep (`signal`)."""
