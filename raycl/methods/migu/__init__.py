"""MIGU: gradient masks by output magnitude."""
