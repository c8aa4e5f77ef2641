"""Schemas for kubeconform: those of Kubernetes that the package kubernetes-validate brings, and those in definitions of
other projects' objects.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

#: kubeconform's program, on the PATH or in the folder of support/cluster.py
PROGRAM = shutil.which("kubeconform") or shutil.which("kubeconform", path=os.environ.get("ALLSPARK_KUBERNETES", ""))
_KINDS = ("service-v1", "statefulset-apps-v1", "deployment-apps-v1", "networkpolicy-networking-v1",
          "poddisruptionbudget-policy-v1")


def _strict(schema: Any) -> None:
    """Refuse fields that a definition does not name, as the API server does with strict validation."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        for value in list(schema.values()):
            _strict(value)
    elif isinstance(schema, list):
        for value in schema:
            _strict(value)


def write_schemas(folder: Path, version: str, definitions: Path) -> list[str]:
    """Writes the schemas of a version of Kubernetes, and of the definitions in a folder. Returns the flags that name
    them. kubeconform resolves no reference to another file, so each schema has what it refers to.
    """
    validate, yaml = pytest.importorskip("kubernetes_validate"), pytest.importorskip("yaml")
    source = Path(validate.__file__).parent / "kubernetes-json-schema" / f"v{version}-local-strict"

    def load(name: str) -> dict[str, Any]:
        return json.loads((source / f"{name}.json").read_text().replace("/api/_definitions.json#", "#"))

    shared = load("_definitions")["$defs"]
    for kind in _KINDS:
        schema = {key: value for key, value in load(kind).items() if key != "$id"}
        (folder / f"{kind}.json").write_text(json.dumps({**schema, "$defs": shared}))
    for file in definitions.glob("*.yaml"):
        for body in filter(None, yaml.load_all(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
            for each in body["spec"]["versions"]:
                schema = each["schema"]["openAPIV3Schema"]
                schema["properties"]["metadata"] = {"type": "object"}
                _strict(schema["properties"].get("spec", {}))
                name = f"{body['spec']['names']['kind'].lower()}-{body['spec']['group']}-{each['name']}.json"
                (folder / name).write_text(json.dumps({**schema, "additionalProperties": False}))
    return ["-schema-location", f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
            "-schema-location", f"{folder}/{{{{.ResourceKind}}}}-{{{{.Group}}}}-{{{{.ResourceAPIVersion}}}}.json"]
