//! A driver: it lays out rings in guest memory, and accesses the registers as a vCPU does.

use lacuna_addr::{Gpa, PageCount};
use lacuna_machine::{Access, Builder, Device, GuestMemory, Line, Vm as _, Width};
use lacuna_soft::{Vm, VmBuilder};
use lacuna_virtio::{Mmio, VirtioDevice};
use std::sync::Arc;
use std::thread::yield_now;
use std::time::{Duration, Instant};
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;

/// The guest's memory.
pub const MEMORY: u64 = 16 << 20;
/// The registers of interrupt and status.
pub const USED_BUFFER: u32 = VIRTIO_MMIO_INT_VRING;
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// The entries of each queue.
pub const SIZE: u16 = 16;
const RINGS: u64 = 1 << 20;
pub const HANG: Duration = Duration::from_secs(120);

/// A VM with so many resident bytes.
pub fn vm(resident: u64) -> Arc<Vm> {
    let pages = PageCount::from_bytes;
    let builder = VmBuilder::new(pages(MEMORY), pages(resident));
    builder.build().expect("a VM")
}

pub fn line(vm: &Arc<Vm>) -> Line {
    vm.interrupts().line(5).expect("a line of this VM")
}

/// Waits until `done`.
pub fn wait(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < HANG, "the device does not answer");
        yield_now();
    }
}

pub struct Driver<D: VirtioDevice> {
    pub vm: Arc<Vm>,
    pub device: Mmio<D>,
}

impl<D: VirtioDevice> Driver<D> {
    /// A device that no driver has found yet.
    pub fn of(device: D) -> Self {
        Self::on(vm(MEMORY), device)
    }

    pub fn on(vm: Arc<Vm>, device: D) -> Self {
        let device = Mmio::new(&vm, line(&vm), device).expect("a thread");
        Self { vm, device }
    }

    /// A device that its driver uses, with all of its queues.
    pub fn ready(device: D) -> Self {
        let driver = Self::of(device);
        driver.start();
        driver
    }

    pub fn get(&self, register: u32) -> u32 {
        self.device.read(access(register.into(), Width::Long)) as u32
    }

    pub fn set(&self, register: u32, value: u32) {
        let ending = self
            .device
            .write(access(register.into(), Width::Long), value.into());
        assert_eq!(ending, None);
    }

    pub fn offered(&self) -> u64 {
        let half = |select| {
            self.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            u64::from(self.get(VIRTIO_MMIO_DEVICE_FEATURES))
        };
        half(0) | half(1) << 32
    }

    /// Returns whether the device takes the features.
    pub fn negotiate(&self, features: u64) -> bool {
        let status = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;
        self.set(VIRTIO_MMIO_STATUS, status);
        for select in 0..2 {
            self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            let half = (features >> (32 * select)) as u32;
            self.set(VIRTIO_MMIO_DRIVER_FEATURES, half);
        }
        self.set(VIRTIO_MMIO_STATUS, status | VIRTIO_CONFIG_S_FEATURES_OK);
        self.status(VIRTIO_CONFIG_S_FEATURES_OK)
    }

    pub fn status(&self, bit: u32) -> bool {
        self.get(VIRTIO_MMIO_STATUS) & bit != 0
    }

    pub fn start(&self) {
        self.start_with(self.offered());
    }

    pub fn start_with(&self, features: u64) {
        assert!(self.negotiate(features));
        for queue in 0..self.device.device().queues() as u32 {
            self.set_rings(queue, SIZE.into(), Self::rings(queue));
            assert_eq!(self.get(VIRTIO_MMIO_QUEUE_READY), 1);
        }
        self.set_driver_ok();
    }

    pub fn set_driver_ok(&self) {
        let status = self.get(VIRTIO_MMIO_STATUS);
        self.set(VIRTIO_MMIO_STATUS, status | VIRTIO_CONFIG_S_DRIVER_OK);
    }

    /// Descriptors, available ring, used ring.
    pub fn rings(queue: u32) -> [u64; 3] {
        let at = RINGS + 0x10000 * u64::from(queue);
        [at, at + 0x4000, at + 0x8000]
    }

    pub fn set_rings(&self, queue: u32, size: u32, rings: [u64; 3]) {
        self.set(VIRTIO_MMIO_QUEUE_SEL, queue);
        self.set(VIRTIO_MMIO_QUEUE_NUM, size);
        let registers = [
            VIRTIO_MMIO_QUEUE_DESC_LOW,
            VIRTIO_MMIO_QUEUE_AVAIL_LOW,
            VIRTIO_MMIO_QUEUE_USED_LOW,
        ];
        for (register, at) in registers.into_iter().zip(rings) {
            self.set(register, at as u32);
            self.set(register + 4, (at >> 32) as u32);
        }
        self.set(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        let gpa = Gpa::new(at).expect("below 2^48");
        self.vm.write(gpa, bytes).expect("guest memory");
    }

    pub fn take(&self, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let gpa = Gpa::new(at).expect("below 2^48");
        self.vm.read(gpa, &mut bytes).expect("guest memory");
        bytes
    }

    fn take_u16(&self, at: u64) -> u16 {
        let bytes = self.take(at, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    pub fn descriptor(
        &self,
        table: u64,
        index: u16,
        (at, bytes, flags): (u64, u32, u16),
        next: u16,
    ) {
        let mut raw = Vec::new();
        raw.extend(at.to_le_bytes());
        raw.extend(bytes.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(next.to_le_bytes());
        self.put(table + 16 * u64::from(index), &raw);
    }

    /// Writes a chain, from descriptor 0 of `table` on.
    pub fn chain(&self, table: u64, buffers: &[(u64, u32, u16)]) {
        for (index, (at, bytes, flags)) in (0..).zip(buffers) {
            let is_last = usize::from(index) + 1 == buffers.len();
            let flags = flags | if is_last { 0 } else { NEXT };
            self.descriptor(table, index, (*at, *bytes, flags), index + 1);
        }
    }

    /// Makes the chain at descriptor `head` available, without a notification.
    pub fn publish(&self, queue: u32, head: u16) {
        let [_, available, _] = Self::rings(queue);
        let index = self.take_u16(available + 2);
        self.put(
            available + 4 + 2 * u64::from(index % SIZE),
            &head.to_le_bytes(),
        );
        self.put(available + 2, &index.wrapping_add(1).to_le_bytes());
    }

    pub fn notify(&self, queue: u32) {
        self.set(VIRTIO_MMIO_QUEUE_NOTIFY, queue);
    }

    pub fn used_index(&self, queue: u32) -> u16 {
        self.take_u16(Self::rings(queue)[2] + 2)
    }

    /// Publishes one chain, without waiting for its end.
    pub fn submit(&self, queue: u32, buffers: &[(u64, u32, u16)]) {
        self.chain(Self::rings(queue)[0], buffers);
        self.publish(queue, 0);
        self.notify(queue);
    }

    /// Publishes one chain, and waits until the device has used it. Returns the written bytes.
    pub fn request(&self, queue: u32, buffers: &[(u64, u32, u16)]) -> u32 {
        let before = self.used_index(queue);
        self.submit(queue, buffers);
        self.used_after(queue, before)
    }

    /// Waits until the device has used the chain `before`. Returns the written bytes.
    pub fn used_after(&self, queue: u32, before: u16) -> u32 {
        wait(|| {
            assert_eq!(self.device.fault(), None);
            self.used_index(queue) != before
        });
        let [_, _, used] = Self::rings(queue);
        let element = self.take(used + 4 + 8 * u64::from(before % SIZE), 8);
        u32::from_le_bytes([element[4], element[5], element[6], element[7]])
    }

    /// Waits until the device needs a reset.
    pub fn broken(&self) {
        wait(|| self.status(VIRTIO_CONFIG_S_NEEDS_RESET));
        assert!(self.device.fault().is_some());
        let interrupt = self.get(VIRTIO_MMIO_INTERRUPT_STATUS);
        assert_ne!(interrupt & VIRTIO_MMIO_INT_CONFIG, 0);
    }
}

/// An access of the first vCPU.
pub fn access(offset: u64, width: Width) -> Access {
    Access {
        offset,
        width,
        vcpu: 0,
    }
}
