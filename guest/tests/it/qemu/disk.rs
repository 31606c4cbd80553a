//! The kernel's virtio drivers, with QEMU's devices.

use super::arm64;
use super::machine::{assert_ended, boot_with, qemu_missing, temp};
use lacuna_guest::Arch;
use std::fs;

/// Creates a zeroed disk, and returns the options for it.
fn disk(name: &str) -> Vec<String> {
    let file = temp(&format!("{name}.disk"));
    let zeros = fs::File::create(&file).and_then(|file| file.set_len(1 << 20));
    zeros.expect("a file");
    let drive = format!("if=none,id=disk,format=raw,file={}", file.display());
    let modern = "virtio-mmio.force-legacy=false".to_owned();
    ["-global", &modern, "-drive", &drive, "-device"]
        .map(str::to_owned)
        .into()
}

/// `diskbusy` in the file that QEMU boots.
fn image(arch: Arch, name: &str) -> std::path::PathBuf {
    let path = temp(name);
    let image = arch.image("diskbusy").expect("in the catalog");
    fs::write(&path, image.file).expect("room");
    path
}

/// QEMU itself writes the devices' words to the command line.
#[test]
fn an_x86_64_guest_uses_its_disk() {
    if qemu_missing() {
        return;
    }
    let mut extra = disk("disk-x86");
    let rest = [
        "virtio-blk-device,drive=disk",
        "-M",
        "microvm,acpi=off,x-option-roms=off,auto-kernel-cmdline=on",
        "-cpu",
        "max",
    ];
    extra.extend(rest.map(str::to_owned));
    let extra: Vec<&str> = extra.iter().map(String::as_str).collect();
    let image = image(Arch::X86_64, "disk.elf");
    let outcome = boot_with(&image, 2, "requests=500 pool=8", &extra);
    assert_ended(&outcome, 0, "verdict=ok");
}

/// With page hinting, QEMU's reports have the queue of the specification.
#[test]
fn an_arm64_guest_uses_its_disk_and_its_balloon() {
    if arm64::qemu_missing() {
        return;
    }
    let mut extra = disk("disk-arm64");
    let rest = [
        "virtio-blk-device,drive=disk,bus=virtio-mmio-bus.31",
        "-object",
        "iothread,id=thread",
        "-device",
        "virtio-balloon-device,free-page-reporting=on,free-page-hint=on,iothread=thread,\
         bus=virtio-mmio-bus.30",
    ];
    extra.extend(rest.map(str::to_owned));
    let extra: Vec<&str> = extra.iter().map(String::as_str).collect();
    let image = image(Arch::Arm64, "disk.Image");
    let words = "virtio_mmio.device=0x200@0xa003e00:79 virtio_mmio.device=0x200@0xa003c00:78 \
                 requests=500 balloon=1";
    let outcome = arm64::boot_file(&image, arm64::MAX, 2, words, &extra);
    assert_ended(&outcome, 0, "verdict=ok");
}
