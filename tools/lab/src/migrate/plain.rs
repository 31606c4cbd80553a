//! Plain copies over a TCP connection of this host: the moves of guests are compared with them.

use crate::backed::back;
use crate::experiment::{LabError, LabResult};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

/// Bytes of one write, as many as in a frame of pages.
const AT_ONCE: usize = 1 << 20;

/// Sends `bytes` bytes from memory into untouched memory. Returns the seconds.
pub fn copy(bytes: u64) -> LabResult<f64> {
    back(bytes)?;
    let took = carry_out(bytes as usize);
    took.map_err(LabError::io("copy over a connection of this host"))
}

fn carry_out(bytes: usize) -> io::Result<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let from: Vec<u8> = (0..bytes).map(|at| (at / 64) as u8 | 1).collect();
    thread::scope(|scope| {
        let reading = scope.spawn(move || {
            let (mut stream, _) = listener.accept()?;
            // The allocator maps it, and Linux gives its pages at the first touch.
            let mut to = vec![0; bytes];
            to.chunks_mut(AT_ONCE)
                .try_for_each(|part| stream.read_exact(part))?;
            let last = *to.last().unwrap_or(&0);
            stream.write_all(&[last])
        });
        let began = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        from.chunks(AT_ONCE)
            .try_for_each(|part| stream.write_all(part))?;
        stream.read_exact(&mut [0])?;
        let took = began.elapsed().as_secs_f64();
        reading.join().expect("the thread does not panic")?;
        Ok(took)
    })
}
