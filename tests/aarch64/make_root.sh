#!/bin/sh
# A folder with an aarch64 Python, LiteRT, ONNX Runtime and what the agent needs, for QEMU's user mode.
#
#     tests/aarch64/make_root.sh DIR        then: HWNAS_AARCH64=DIR make soak
#
# Needs Debian's apt-get (packages are fetched and unpacked, none is installed), pip, and qemu-user-static to run it.
set -eu
root=$1
mkdir -p "$root"
root=$(cd "$root" && pwd)
fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
mkdir -p "$fetched/lists/partial" "$fetched/cache/archives/partial" "$fetched/debs"
touch "$fetched/status"
apt="apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists=$fetched/lists
     -o Dir::State::status=$fetched/status -o Dir::Cache=$fetched/cache -o APT::Sandbox::User=root"
$apt update
(cd "$fetched/debs" && $apt download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libc-bin \
    libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libssl3 libuuid1 libgomp1 dash)
for deb in "$fetched"/debs/*.deb; do dpkg -x "$deb" "$root"; done
wheels="--only-binary=:all: --python-version 3.11 --implementation cp --platform manylinux_2_17_aarch64
        --platform manylinux2014_aarch64 --platform manylinux_2_26_aarch64 --platform manylinux_2_27_aarch64
        --platform manylinux_2_28_aarch64 --platform manylinux_2_34_aarch64 --platform manylinux_2_35_aarch64"
# --no-deps: the agent needs no more than this
python3 -m pip install -q --no-deps --no-compile --upgrade $wheels --target "$root/packages" \
    "numpy==${NUMPY:-2.4.6}" "ai-edge-litert==${LITERT:-2.3.0}" "onnxruntime==${ORT:-1.31.1}" flatbuffers \
    filelock onnx protobuf ml_dtypes typing_extensions
# Runtimes ask what the CPU can do: without this they would be told of the one underneath.
mkdir -p "$root/proc"
cat > "$root/proc/cpuinfo" <<'CPU'
processor	: 0
BogoMIPS	: 108.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x4
CPU part	: 0xd0b
CPU revision	: 1

CPU
