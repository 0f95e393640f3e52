"""`python -m tests.readme FOLDER ENDPOINT BUCKET ACCESS_KEY SECRET_KEY`: a new user's day, as programs in a folder.

`day.sh` is README from its first block to its last. Its user has the checkout in ~/fusecache, FOLDER as ~/day, sudo.
"""

import sys
from pathlib import Path

from tests.support.readme import TRAIN, TRANSFORMERS, readme_block, readme_blocks, with_bucket

_DAY = """\
set -euo pipefail
cd ~/fusecache
{install}
[ "$(cat /data/hello 2>/dev/null)" = "" ]  # it is unmounted
python3 -m venv ~/trainer
. ~/trainer/bin/activate
pip install --quiet --disable-pip-version-check $TORCH $TORCH_FLAGS '.[loader]'
cd ~/day
{train}
[ "$(python resume.py)" = None ]
[ "$(python resume.py)" = /data/checkpoints/checkpoint-500 ]
python read.py
[ -s /data/step-1000.pt ]
[ "$(cat /data/hello)" = hello ]
fusecache unmount /data
"""


def main() -> None:
    """Write the programs."""
    folder = Path(sys.argv[1])
    endpoint_url, bucket, access_key, secret_key = sys.argv[2:]

    def named(code: str) -> str:
        return with_bucket(
            code,
            endpoint_url=endpoint_url,
            access_key=access_key,
            secret_key=secret_key,
            source=f"s3://{bucket}",
        )

    install, train = map(named, readme_blocks())
    programs = {
        "day.sh": _DAY.format(install=install, train=train),
        "train.py": TRAIN,
        "transformers.py": TRANSFORMERS,
        "resume.py": f"model = dataset = None\n{readme_block('python', 'Trainer')}\nprint(checkpoint)\n",
        "read.py": readme_block("python", "MDSDataset"),
    }
    for name, program in programs.items():
        (folder / name).write_text(program)


if __name__ == "__main__":
    main()
