//! Requests in progress: the test says when a request ends.

use crate::driver::{Driver, WRITE};
use lacuna_machine::Device;
use lacuna_virtio::{Answer, Chain, Fault, Guest, VirtioDevice};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use virtio_bindings::virtio_mmio::*;

const AT: u64 = 0x30_0000;

/// A device that reports the begin of a request, and ends it when the test says so.
struct Slow {
    begun: Mutex<Sender<()>>,
    end: Mutex<Receiver<()>>,
}

impl VirtioDevice for Slow {
    fn id(&self) -> u32 {
        42
    }

    fn queues(&self) -> usize {
        1
    }

    fn handle(&self, _: usize, chain: &Chain, guest: &Guest<'_>) -> Result<Answer, Fault> {
        self.begun
            .lock()
            .expect("no panic")
            .send(())
            .expect("a test");
        self.end.lock().expect("no panic").recv().expect("a test");
        chain.writable.write(guest, 0, b"done")?;
        Ok(Answer::Used(4))
    }
}

/// A driver whose request is in progress.
fn in_progress() -> (Arc<Driver<Slow>>, Sender<()>, Receiver<()>) {
    let ((begin, begun), (end, ended)) = (channel(), channel());
    let driver = Driver::ready(Slow {
        begun: Mutex::new(begin),
        end: Mutex::new(ended),
    });
    driver.submit(0, &[(AT, 4, WRITE)]);
    begun.recv().expect("a request");
    (Arc::new(driver), end, begun)
}

/// Runs `life` beside the request in progress, which ends meanwhile. Then publishes another one,
/// which does not begin.
fn beside(life: fn(&Driver<Slow>)) -> (Arc<Driver<Slow>>, Sender<()>, Receiver<()>) {
    let (driver, end, begun) = in_progress();
    let other = thread::spawn({
        let driver = Arc::clone(&driver);
        move || {
            life(&driver);
            (driver.used_index(0), driver.take(AT, 4))
        }
    });
    end.send(()).expect("a device");
    assert_eq!(other.join().expect("no panic"), (1, b"done".to_vec()));
    driver.publish(0, 0);
    driver.notify(0);
    drop(driver.device.state());
    assert!(begun.try_recv().is_err());
    (driver, end, begun)
}

#[test]
fn a_pause_ends_the_request_in_progress() {
    let (driver, end, begun) = beside(|driver| driver.device.pause());
    driver.device.resume();
    begun.recv().expect("the second request");
    end.send(()).expect("a device");
    assert_eq!(driver.used_after(0, 1), 4);
}

#[test]
fn a_reset_ends_the_request_in_progress() {
    let (driver, ..) = beside(|driver| driver.set(VIRTIO_MMIO_STATUS, 0));
    assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn a_queue_is_taken_back_after_its_request() {
    let (driver, ..) = beside(|driver| driver.set(VIRTIO_MMIO_QUEUE_READY, 0));
    assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_READY), 0);
}

/// Registers answer while a request is in progress, and the VM may end.
#[test]
fn a_vm_ends_before_its_device() {
    let (driver, end, _begun) = in_progress();
    assert_eq!(driver.get(VIRTIO_MMIO_VERSION), 2);
    let driver = Arc::into_inner(driver).expect("the only reference");
    let Driver { vm, device } = driver;
    drop(vm);
    end.send(()).expect("a device");
    device.pause();
    device.resume();
    device.reset();
}
