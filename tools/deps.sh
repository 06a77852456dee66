#!/bin/sh
# Installs Debian packages that the tests use and Python packages cannot bring. Needs root only if one is missing.
set -eu
missing=
command -v redis-server >/dev/null || missing="$missing redis-server"
for package in "$@"; do
    command -v "${package%%=*}" >/dev/null || missing="$missing ${package##*=}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "deps: missing:$missing; install them as root, the tests that need them are skipped until then" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# Only the program is wanted: a service must not start by itself.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086
apt-get install -q -y --no-install-recommends $missing
