"""Small scripts that people run: on the mount they print, return and leave what they do on a local disk.

Then the bucket and another node have the same tree. `published` waits until the bucket has everything, and does nothing
on the local disk; it makes the difference between a file that is pending and one that is an object. Times that a script
depends on are set by it: a file's own time becomes that of its upload.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.mount.test_tools import assert_same_elsewhere
from tests.support.mounts import FUSECACHE, tree_of

SCRIPTS = {
    # names
    "names of all kinds": r"""
        for name in ' lead' 'trail ' 'dot.' '-n' 'a\b' '%2F' 'a+b' 'star*' '"quoted"' "it's" '~' '#x' '?q=1&r' 'CON' \
            '😀' $'new\nline' $'tab\t' $'\u202eright' $'\u00e9' $'e\u0301' '...' 'a:b' 'x;y' '$HOME' '`id`'; do
            echo "$name" > "./$name"
        done
        published
        cat ./*
        rm -- '-n' 'star*' '?q=1&r'
        find . -type f | wc -l""",
    "the longest name": r"""
        long=$(printf 'é%.0s' $(seq 127)); echo 1 > "$long"; published
        mv "$long" "x$long"; cat "x$long"; touch "xx$long" 2>/dev/null || echo too long""",
    "names that differ in case": r"""
        echo 1 > Readme; echo 2 > README; mkdir Data data; echo 3 > Data/x; echo 4 > data/x; published
        mv README readme; cat Readme readme Data/x data/x; rm -r Data; ls -R""",
    "a decomposed tree through tar": r"""
        mkdir -p $'src/e\u0301/u\u0308'; echo 1 > $'src/e\u0301/u\u0308/o\u0308.txt'; echo 2 > $'src/\u00e9'
        tar -cf all.tar src; rm -r src; published; tar -xf all.tar; published
        find src -delete; ls; tar -xf all.tar; rm all.tar""",
    "a decomposed directory is moved, copied and removed": r"""
        mkdir -p $'e\u0301/in'; echo 1 > $'e\u0301/in/n\u0303'; published
        cp -r $'e\u0301' $'\u00e9'; mv $'e\u0301' $'moved e\u0301'; published; rm -r $'\u00e9'; ls -R""",
    "git with decomposed names": r"""
        export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_DATE=@0+0000 GIT_COMMITTER_DATE=@0+0000
        git init -q -b main repo && cd repo && git config user.name n && git config user.email e && git config gc.auto 0
        echo 1 > $'cafe\u0301'; git add . && git commit -qm one && published
        git mv $'cafe\u0301' $'caf\u00e9'; git status -s; git commit -qm two; git status -s; cat caf*
        git log --format=%s --stat=80; rm .git/index""",
    "zip with decomposed names": r"""
        mkdir $'d e\u0301'; echo 1 > $'d e\u0301/a\u030a'; touch -d @1000000000 d*/* d*; zip -qrX x.zip d*; rm -r d*
        published; unzip -qo x.zip; ls *""",
    # all of it or none of it
    "mv onto a directory that is not empty": r"""
        mkdir -p a/x b/x; echo 1 > a/x/f; echo 2 > b/x/g; published; mv a/x b 2>&1 | sed 's/.*: //'; find . | sort""",
    "mv of a directory into itself": r"""
        mkdir -p a/b; echo 1 > a/f; published; mv a a/b 2>/dev/null || echo refused; find . | sort""",
    "cp -al": "mkdir a; echo 1 > a/f; published; cp -al a b 2>/dev/null; cat a/f; rm -rf b",
    "rm -r while a file is being written": r"""
        mkdir d; exec 9> d/f; echo 1 >&9; echo 2 > d/g; rm -r d; echo 3 >&9; exec 9>&-; ls""",
    "rm -r and made again at once": r"""
        mkdir d; echo 1 > d/old; echo 2 > d/both; published
        rm -r d; mkdir d; echo 3 > d/both; echo 4 > d/new; cat d/*""",
    "a directory is exchanged for a file and back": r"""
        mkdir n; echo 1 > n/f; published; rm -r n; echo 2 > n; published; rm n; mkdir n; echo 3 > n/g; find . | sort""",
    "a tree is moved over an empty one": r"""
        mkdir -p new/d empty; echo 1 > new/d/f; published; mv -T new empty; published
        mv -T empty back; find . | sort""",
    "directories that take each other's place": r"""
        for each in a b; do mkdir $each; echo $each > $each/name; done; published
        mv a tmp; mv b a; mv tmp b; cat a/name b/name""",
    # editing in place
    "sed -i": "echo one two > f; published; sed -i s/one/1/ f; published; sed -i s/two/2/ f; cat f",
    "sed -i of many": r"""
        for i in $(seq 30); do echo a$i > f$i; done; published; sed -i s/a/b/ f*; cat $(ls -v f*)""",
    "perl -pi with backups": "echo one > f; published; perl -pi.bak -e s/one/1/ f; cat f f.bak",
    "sort -o the same file": "seq 500 | sort -R --random-source=/etc/passwd > f; published; sort -n -o f f; md5sum f",
    "truncate": r"""
        seq 10000 > f; published; truncate -s 100 f; wc -c f; published; truncate -s 200 f; md5sum f; : > f; wc -c f""",
    "append again and again": "for i in $(seq 12); do echo $i >> log; [ $((i % 4)) = 0 ] && published; done; cat log",
    "two programs append": r"""
        for who in a b; do (for i in $(seq 50); do echo $who$i >> log; done) & done; wait
        sort -o log log; wc -l log""",
    "tee -a": "echo 1 > f; published; echo 2 | tee -a f > /dev/null; cat f",
    "dd into the middle": r"""
        seq 5000 > f; published; printf XXXX | dd of=f bs=1 seek=1000 conv=notrunc status=none; md5sum f""",
    "a patch": r"""
        seq 9 > f; cp f g; sed -i s/5/five/ g; diff -u f g > p; published; cp g new; mv new f; cmp f g && echo same
        sed -i 1,2d p""",
    "a reader keeps what it opened": r"""
        echo old > f; published; exec 8< f; echo new > f.tmp; mv f.tmp f; cat <&8; cat f; exec 8<&-""",
    "cp over a file that is open": "echo old > f; published; exec 8< f; echo new > g; cp g f; cat f; exec 8<&-",
    # rotation
    "logs rotate": r"""
        for i in 1 2 3 4; do echo $i > log; [ -e log.2 ] && mv log.2 log.3; [ -e log.1 ] && mv log.1 log.2; mv log log.1
            [ $i = 2 ] && published; done; tail -n 1 log.*""",
    "a log is copied and cut": "seq 100 > log; published; cp log log.1; : > log; echo on >> log; cat log; wc -l log.1",
    "links that are turned over": r"""
        for i in 1 2 3; do mkdir v$i; echo $i > v$i/f; ln -sfn v$i current; cat current/f; published; done
        readlink current""",
    "a link by rename": "echo 1 > a; ln -s a l; published; ln -s b l.new; mv -T l.new l; echo 2 > b; cat l",
    # copies
    "make": r"""
        printf 'out: in\n\tcat in > out\n' > Makefile; echo 1 > in; touch -d @5 in; make; published; make
        touch -d @3 out; echo 2 > in; touch -d @5 in; make; make; published; make; touch -d @3 out; make; cat out""",
    "cp -p, then rsync finds nothing to do": r"""
        mkdir a; echo 1 > a/f; touch -d @1000000000 a/f; cp -rp a b; published; rsync -ain a/f b/f; stat -c %Y b/f""",
    "rsync twice with --delete": r"""
        mkdir -p a/d; seq 100 > a/f; echo 1 > a/d/x; echo 2 > a/gone
        touch -d @1000000000 a/* a/d/x; rsync -a --delete a/ b/; published
        rm a/gone; seq 90 > a/f; touch -d @1100000000 a/f
        rsync -aiO --delete a/ b/ | sort | cut -c1-3,13-; rsync -aiO --delete a/ b/""",
    "rsync --inplace --append": r"""
        mkdir b; seq 100 > a; cp a b/a; published; seq 101 200 >> a; rsync --append a b/a; md5sum b/a""",
    "rsync takes files away": r"""
        mkdir -p from/d to; for i in 1 2 3; do echo $i > from/d/$i; done; published
        rsync -a --remove-source-files from/ to/; find . -type f | sort; find from -type d -empty -delete; ls""",
    "install": r"""
        echo 1 > f; install -m 755 f bin; install -D f deep/er/bin; published
        install -m 755 f bin; cat bin deep/er/bin""",
    "a file with holes": r"""
        truncate -s 3M holes; printf end | dd of=holes bs=1 seek=2000000 conv=notrunc status=none; published
        cp --sparse=always holes copy; cp --reflink=auto holes again; cmp holes copy; cmp copy again; wc -c again""",
    "split and joined": r"""
        seq 20000 > f; split -b 20k f part.; rm f; published; cat part.* > f; rm part.*; md5sum f""",
    "a download that goes on": r"""
        seq 3000 > whole; head -c 5000 whole > f.part; published
        tail -c +5001 whole >> f.part; mv f.part f; cmp f whole; ls""",
    "a tar that is added to": r"""
        echo 1 > a; echo 2 > b; tar --mtime=@0 -cf t a; published; tar --mtime=@0 -rf t b; tar -tf t; tar -xOf t b""",
    "gzip and back": "seq 1000 > f; published; gzip -n f; ls; published; gunzip f.gz; ls; md5sum f",
    # looking
    "globs and find": r"""
        mkdir -p d/e; touch -d @9 d/1.txt d/2.log d/e/3.txt; touch -d @8 .hidden; published; ls d/*.txt
        find . -name '*.txt' -newer .hidden -o -name '.h*'; find . -empty -type f | wc -l
        du -a --apparent-size d/e | wc -l""",
    "time of a directory's newest file": r"""
        for i in 1 2 3; do echo $i > f$i; touch -d @100000000$i f$i; done; published; ls -t; ls -tr | head -1""",
    "a lock directory": r"""
        for i in 1 2 3; do mkdir lock && echo got; mkdir lock 2>/dev/null || echo held; rmdir lock; done; ls""",
    "python's own files": r"""
        echo 'x = 1' > mod.py; python3 -c 'import mod; print(mod.x)'; published; echo 'x = 22' > mod.py
        python3 -c 'import mod; print(mod.x)'; rm -r __pycache__""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_does_what_it_does_on_a_local_disk(place: Place, tmp_path: Path, script: str):
    local = tmp_path / "local"
    local.mkdir()
    expected = outcome(script, local, "true")
    assert outcome(script, place.path, f"{FUSECACHE} sync . >/dev/null 2>&1 || exit 99") == expected
    assert tree_of(place.path) == tree_of(local)
    assert_same_elsewhere(place)


def outcome(script: str, where: Path, published: str) -> tuple[int, str, str]:
    """Run a script in a directory; return its status and what it printed."""
    words = ["bash", "-c", f"umask 022; published() {{ {published}; }}; {script}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        words, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout, done.stderr
