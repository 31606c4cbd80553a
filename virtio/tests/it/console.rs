//! The console device.

use crate::driver::{Driver, WRITE, line};
use lacuna_machine::Device;
use lacuna_virtio::{Console, Mmio};
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

const AT: u64 = 0x30_0000;

/// A writer whose output the test reads.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn output_reaches_the_writer() {
    let sink = Sink::default();
    let driver = Driver::ready(Console::new(sink.clone()));
    driver.put(AT, b"hello, ");
    driver.put(AT + 0x1000, &[b'x'; 5000]);
    assert_eq!(driver.request(1, &[(AT, 7, 0), (AT + 0x1000, 5000, 0)]), 0);
    let expected = [&b"hello, "[..], &[b'x'; 5000]].concat();
    assert_eq!(*sink.0.lock().expect("no panic"), expected);
}

#[test]
fn too_much_output_needs_a_reset() {
    let driver = Driver::ready(Console::new(Sink::default()));
    driver.submit(1, &[(AT, (1 << 20) + 1, 0)]);
    driver.broken();
}

/// A buffer that is available before the input, and one that is smaller than it.
#[test]
fn input_reaches_the_driver() {
    let driver = Driver::ready(Console::new(Sink::default()));
    driver.submit(0, &[(AT, 64, WRITE)]);
    driver.device.pause();
    assert_eq!(driver.used_index(0), 0);
    driver.device.resume();
    assert_eq!(driver.device.input(b"abc"), 3);
    assert_eq!(driver.used_after(0, 0), 3);
    assert_eq!(driver.take(AT, 4), *b"abc\0");
    assert_eq!(driver.device.input(b"defgh"), 5);
    assert_eq!(driver.request(0, &[(AT, 2, WRITE)]), 2);
    assert_eq!(driver.request(0, &[(AT + 2, 64, WRITE)]), 3);
    assert_eq!(driver.take(AT, 6), *b"defgh\0");
}

#[test]
fn input_is_bounded_and_moves() {
    let mut driver = Driver::ready(Console::new(Sink::default()));
    let many = vec![b'a'; Console::INPUT_MAX - 1];
    assert_eq!(driver.device.input(&many), many.len());
    assert_eq!(driver.device.input(b"bc"), 1);
    assert_eq!(driver.device.input(b"c"), 0);
    driver.device.pause();
    let state = driver.device.state();
    let fresh = Console::new(Sink::default());
    driver.device = Mmio::new(&driver.vm, line(&driver.vm), fresh).expect("a thread");
    driver.device.set_state(&state).expect("a good state");
    driver.device.resume();
    let size = Console::INPUT_MAX as u32;
    assert_eq!(driver.request(0, &[(AT, size + 1, WRITE)]), size);
    assert_eq!(driver.take(AT + u64::from(size) - 2, 3), *b"ab\0");
    assert_eq!(driver.device.input(b"c"), 1);
}

/// A writer that panics takes only its own output with it.
#[test]
fn a_panic_of_the_writer_needs_a_reset() {
    struct Bad;
    impl Write for Bad {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            panic!("on purpose");
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let driver = Driver::ready(Console::new(Bad));
    driver.submit(1, &[(AT, 1, 0)]);
    driver.broken();
    driver.device.reset();
}
