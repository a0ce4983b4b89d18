"""`make check-deploy`: hadolint reads the Dockerfile, what Kustomize makes of overlays follows Kubernetes' schemas, and
workflows follow GitHub's.

The pods of a LeaderWorkerSet, whose own schema is not Kubernetes', are checked as pods.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

HERE = Path(__file__).parent
VERSION = "1.37"


def main() -> int:
    hadolint = Path(sys.executable).with_name("hadolint")
    faults = subprocess.run([hadolint, HERE.parent / "Dockerfile"], check=False).returncode
    follows_schema = Path(sys.executable).with_name("check-jsonschema")
    workflows = sorted((HERE.parent / ".github/workflows").glob("*.yml"))
    faults += subprocess.run(
        [follows_schema, "--builtin-schema", "vendor.github-workflows", *workflows], check=False
    ).returncode
    for folder in sorted((HERE / "overlays").iterdir()):
        for document in yaml.safe_load_all(built(folder)):
            for resource in resources(document):
                faults += fails(folder.name, resource)
    return 1 if faults else 0


def built(folder: Path) -> str:
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", folder]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", folder]
    else:
        sys.exit("neither kubectl nor kustomize is installed; check-deploy needs one of them")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] != "LeaderWorkerSet":
        yield document
        return
    for role in ("leaderTemplate", "workerTemplate"):
        template = document["spec"]["leaderWorkerTemplate"][role]
        metadata = template["metadata"] | {"name": f"{document['metadata']['name']}-{role}"}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def fails(overlay: str, resource: dict[str, Any]) -> bool:
    name = f"{overlay}: {resource['kind']} {resource['metadata']['name']}"
    try:
        kubernetes_validate.validate(resource, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        print(f"{name}: {error.message}")
        return True
    print(f"{name}: ok")
    return False


if __name__ == "__main__":
    sys.exit(main())
