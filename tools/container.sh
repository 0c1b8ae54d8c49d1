#!/usr/bin/env bash
# Builds and tries the container image by buildah, which needs no daemon: make container,
# make container-test. Settings come from the environment:
#   BASE=IMAGE          the image to build on: Debian or Ubuntu with Python 3.10 to 3.12
#                       (default: debian:bookworm, made by debootstrap if no registry has it)
#   IMAGE=NAME          the name of the image                (default: hvps)
#   STORAGE=FOLDER      where buildah keeps images           (default: ~/.cache/hvps/containers)
#   APT_MIRROR=URL      Debian's mirror for debootstrap      (default: this machine's)
# pip's settings (index, certificates, proxy) are those of this machine. They reach the build as
# secrets, which are in no layer. A Horovod wheel is kept where `make install` keeps its own.
set -euo pipefail

readonly SUITE=bookworm
readonly DEBIAN=http://deb.debian.org/debian
readonly PULL_SECONDS=120
readonly NEEDED_GIB=12
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=localhost/${IMAGE:-hvps}
cache=${HVPS_CACHE:-$HOME/.cache/hvps}
storage=${STORAGE:-$cache/containers}
scratch=
working=()

fail() { # what, rule, received, do
  printf 'error: %s\n  rule:     %s\n  received: %s\n  do:       %s\n' "$@" >&2
  exit 1
}

say() {
  printf '%s\n' "$*"
}

# All calls: no daemon, no kernel features beyond chroot and bind mounts.
buildah_() {
  # What it unpacks goes beside the storage, not into /var/tmp, and is removed with it.
  TMPDIR=$scratch/tmp BUILDAH_ISOLATION=chroot \
    buildah --storage-driver vfs --root "$storage/root" --runroot "$storage/run" "$@"
}

clean_up() {
  local status=$? container
  trap - EXIT
  for container in "${working[@]}"; do
    buildah_ rm "$container" >/dev/null 2>&1 || true
  done
  if [ -n "$scratch" ]; then
    rm -rf "$scratch"
  fi
  exit "$status"
}

prepare() {
  command -v buildah >/dev/null || fail "buildah was not found" \
    "the image is built by buildah, without a daemon" "no buildah on PATH" \
    "install it (Debian, Ubuntu: apt-get install buildah), or use docker: docker build -f launch/docker/Dockerfile -t hvps ."
  mkdir -p "$storage"
  scratch=$(mktemp -d "$storage/build-XXXXXX")
  mkdir "$scratch/tmp"
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

require_disk() {
  local free
  free=$(($(df --output=avail -k "$storage" | tail -n 1) / 1048576))
  [ "$free" -ge "$NEEDED_GIB" ] || fail "there is not enough disk space" \
    "about $NEEDED_GIB GiB while the image is built: the storage driver vfs copies each layer" \
    "$free GiB free at $storage" "make room there, or name another folder: STORAGE=/path make container"
}

# The value of one of pip's settings: of its variable, else of its configuration files.
pip_setting() { # index-url
  local name
  name=PIP_$(printf '%s' "$1" | tr 'a-z-' 'A-Z_')
  if [ -n "${!name:-}" ]; then
    printf '%s' "${!name}"
  else
    python3 -m pip config get "global.$1" 2>/dev/null || true
  fi
}

# Writes what only this machine needs, to be given to the build as secrets.
write_secrets() {
  local name value kept certificates
  : >"$scratch/environment"
  for name in index-url extra-index-url trusted-host timeout proxy; do
    kept=
    for value in $(pip_setting "$name"); do
      case $value in
        file:* | /*) ;; # a folder of this machine, which the image does not see
        *) kept="$kept${kept:+ }$value" ;;
      esac
    done
    if [ -n "$kept" ]; then
      printf 'export PIP_%s=%q\n' "$(printf '%s' "$name" | tr 'a-z-' 'A-Z_')" "$kept" \
        >>"$scratch/environment"
    fi
  done
  for name in http_proxy https_proxy no_proxy; do
    if [ -n "${!name:-}" ]; then
      printf 'export %s=%q\n' "$name" "${!name}" >>"$scratch/environment"
    fi
  done
  : >"$scratch/certificates"
  certificates=$(pip_setting cert)
  if [ -n "$certificates" ] && [ -r "$certificates" ]; then
    cat "$certificates" >"$scratch/certificates"
    printf 'export PIP_CERT=/run/hvps/certificates\n' >>"$scratch/environment"
  fi
  : >"$scratch/apt-sources"
}

# The mirror that this machine's apt takes Debian from.
apt_mirror() {
  local found=
  if command -v apt-get >/dev/null; then
    # shellcheck disable=SC2016 # apt's variables, not the shell's
    found=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' \
      2>/dev/null | awk -v suite="$SUITE" '$1 == suite { print $2; exit }') || true
  fi
  found=${APT_MIRROR:-${found:-$DEBIAN}}
  printf '%s' "${found%/}"
}

# A base without a registry: Debian's own tool, then the tree as one layer.
make_base() { # name
  local mirror container
  command -v debootstrap >/dev/null || fail "debootstrap was not found" \
    "without a registry that has debian:$SUITE, the base is made by debootstrap" \
    "no debootstrap on PATH, and: $(tail -n 1 "$scratch/pull.log")" \
    "install it (Debian, Ubuntu: apt-get install debootstrap), or name a base that can be had: BASE=..."
  [ "$(id -u)" -eq 0 ] || fail "debootstrap needs root" \
    "it makes a system's files, which belong to root" "user $(id -un)" \
    "run this as root, or name a base: make container BASE=..."
  mirror=$(apt_mirror)
  say "making a base by debootstrap (Debian $SUITE, about half a minute)"
  if ! debootstrap --variant=minbase "$SUITE" "$scratch/base" "$mirror" >"$scratch/debootstrap.log" 2>&1; then
    tail -n 15 "$scratch/debootstrap.log" >&2
    fail "debootstrap ended with an error" "it fetches Debian $SUITE from a mirror" \
      "the mirror $mirror; its last lines are above" "name another mirror: APT_MIRROR=http://..."
  fi
  # The image names Debian's own hosts; another mirror is for the build alone.
  printf 'deb %s main\n' "$DEBIAN $SUITE" "$DEBIAN $SUITE-updates" "$DEBIAN-security $SUITE-security" \
    >"$scratch/base/etc/apt/sources.list"
  if [ "$mirror" != "$DEBIAN" ]; then
    printf 'deb %s %s main\n' "$mirror" "$SUITE" >"$scratch/apt-sources"
  fi
  rm -rf "$scratch/base/var/cache/apt/archives" "$scratch/base/var/log/bootstrap.log"
  rm -rf "$scratch/base/var/lib/apt/lists"
  # The host's names, which debootstrap copies.
  rm -f "$scratch/base/etc/resolv.conf" "$scratch/base/etc/hostname"
  container=$(buildah_ from scratch)
  working+=("$container")
  buildah_ add -q "$container" "$scratch/base" / >/dev/null
  buildah_ commit -q --rm "$container" "$1" >/dev/null
  working=()
  rm -rf "$scratch/base"
}

build() {
  local base=${BASE:-} made='' began=$SECONDS
  local arguments=()
  prepare
  require_disk
  write_secrets
  if [ -z "$base" ]; then
    base=debian:$SUITE
    if ! timeout "$PULL_SECONDS" "$0" --pull "$base" "$scratch" >"$scratch/pull.log" 2>&1; then
      made=localhost/hvps-base
      base=$made
      make_base "$made"
      arguments+=(--pull-never)
    fi
  fi
  mkdir -p "$cache/wheels"
  say "building $image on $base (log: $storage/build.log)"
  # One layer on top of the base: vfs would copy the whole tree for each.
  if ! buildah_ build "${arguments[@]}" --layers=false --isolation chroot --network host \
    --build-arg "BASE=$base" \
    --build-arg HVPS_CACHE=/run/hvps-cache --volume "$cache/wheels:/run/hvps-cache/wheels" \
    --secret "id=environment,src=$scratch/environment" \
    --secret "id=certificates,src=$scratch/certificates" \
    --secret "id=apt-sources,src=$scratch/apt-sources" \
    --file "$root/launch/docker/Dockerfile" --tag "$image" "$root" >"$storage/build.log" 2>&1; then
    tail -n 25 "$storage/build.log" >&2
    fail "the image was not built" "each step of launch/docker/Dockerfile ends with status 0" \
      "its last lines are above" "read $storage/build.log"
  fi
  if [ -n "$made" ]; then
    # Its layer stays, as the image's first one; the name goes.
    buildah_ rmi "$made" >/dev/null
  fi
  say "built $image in $((SECONDS - began)) s"
}

# The unit tests, and a training with two ranks, in the image and as its user.
try() {
  local container began=$SECONDS
  prepare
  container=$(buildah_ from --pull-never "$image" 2>"$scratch/from.log") || fail \
    "there is no image $image" "make container-test tries what make container has built" \
    "$(tail -n 1 "$scratch/from.log")" "make container"
  working+=("$container")
  say "unit tests"
  run_in "$container" make test-quick
  say "a training with two ranks"
  run_in "$container" mpirun -np 2 python -m hvps.train configs/allreduce.yaml train.epochs=1
  say "$image works: $((SECONDS - began)) s"
}

run_in() { # container command...
  local container=$1
  shift
  buildah_ run --isolation chroot --user hvps --env HOME=/home/hvps --env HVPS_PEERS=localhost \
    "$container" -- hvps-entrypoint "$@" </dev/null
}

case ${1:-} in
  build) build ;;
  test) try ;;
  # For `timeout`, which can only start programs.
  --pull) scratch=$3 && buildah_ pull -q "$2" ;;
  *) fail "no such command" "tools/container.sh build | test" "${1:-nothing}" "make container" ;;
esac
