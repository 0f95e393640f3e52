#!/bin/bash
# cloud-init's own check of user-data.yaml, and then cloud-init carries it out, up to the mounted bucket. It changes /etc:
# run it as root on a machine to throw away, with Debian's cloud-init, and fusecache in /opt/fusecache/venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
here=examples/deploy/cloud-init

check "the schema of cloud-init accepts the file" cloud-init schema --config-file $here/user-data.yaml
sed 's/^package_update: true/package_update: maybe/' $here/user-data.yaml >"$folder/wrong.yaml"
if cloud-init schema --config-file "$folder/wrong.yaml" 2>"$folder/wrong.log"; then fail "a wrong value is found"; fi
ok "it finds a wrong value"

serve
seed=/var/lib/cloud/seed/nocloud
mkdir -p $seed
sed -e "s|s3://my-bucket|s3://$BUCKET|" -e "s|https://ACCOUNT.*com|$AWS_ENDPOINT_URL|" -e 's|ID=KEY|ID=key|' \
    -e 's| @ https://HOST/[^"]*||' -e 's|KEY=SECRET|KEY=secret|' -e '/^package/d' $here/user-data.yaml >$seed/user-data
echo "instance-id: try-$$" >$seed/meta-data
# Of its modules only those that the file uses: a bare machine has neither locales nor sshd.
cat >/etc/cloud/cloud.cfg.d/99-try.cfg <<CONF
datasource_list: [NoCloud]
cloud_init_modules: [write-files]
cloud_config_modules: [runcmd]
cloud_final_modules: [scripts-user]
CONF
# What the units of cloud-init run at boot, one after the other.
unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
at_end "fusecache unmount /data"
for stage in "init --local" "init" "modules --mode=config" "modules --mode=final"; do
    # shellcheck disable=SC2086 # words
    cloud-init $stage >>"$folder/cloud-init.log" 2>&1 || fail "cloud-init $stage: $(tail -n 5 "$folder/cloud-init.log")"
done
check "the bucket is mounted" mountpoint --quiet /data
check "the keys are root's alone" [ "$(stat --format=%a%u /etc/fusecache/data.keys)" = 6000 ]
check "fstab has the line once" [ "$(grep -c ' /data fusecache ' /etc/fstab)" = 1 ]
echo weights >/data/final.pt
fusecache sync /data
export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret
check "a file that is written there is in the bucket" in_bucket final.pt
fusecache unmount /data
check "as at the next boot: the line of fstab mounts it" mount /data
fusecache unmount /data
check "no mount is left" not_mounted /data
not_here "apt-get and pip from the network, a boot with systemd, and a cloud's own data source"
