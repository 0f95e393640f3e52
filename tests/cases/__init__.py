"""The cases that the contract of the mount must pass, by number: `docs/cases.md` lists them with their tests."""
