//! The console output of a guest, line by line.

/// Receives the guest's console output, in whole lines or at the end of the run. A vCPU's thread
/// calls it while it holds the lock of the serial line. It may end the run
/// ([`PlatformDevices::end`](crate::PlatformDevices::end)), but it must not access guest memory,
/// change the VM or wait for another thread.
pub trait Console: Send {
    /// One line without its newline. Invalid UTF-8 is replaced.
    fn line(&mut self, text: &str);
}

impl<F: FnMut(&str) + Send> Console for F {
    fn line(&mut self, text: &str) {
        self(text)
    }
}

/// The longest line. Longer ones are passed on in pieces: otherwise an endless line would make the
/// VMM grow.
pub(super) const LINE_MAX: usize = 4096;

/// Makes lines of the bytes from a serial line.
pub(super) struct Lines {
    console: Box<dyn Console>,
    partial: Vec<u8>,
}

impl Lines {
    pub(super) fn new(console: impl Console + 'static) -> Self {
        Self {
            console: Box::new(console),
            partial: Vec::new(),
        }
    }

    /// The unfinished line.
    pub(super) fn partial(&self) -> &[u8] {
        &self.partial
    }

    pub(super) fn set_partial(&mut self, partial: Vec<u8>) {
        self.partial = partial;
    }

    /// Gives the console the unfinished last line.
    pub(super) fn flush(&mut self) {
        if !self.partial.is_empty() {
            // Take the line first: if the console panics, it does not get the line again.
            let line = std::mem::take(&mut self.partial);
            self.console.line(&String::from_utf8_lossy(&line));
        }
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for &byte in bytes {
            match byte {
                b'\n' if self.partial.is_empty() => self.console.line(""),
                b'\n' => self.flush(),
                b'\r' => {}
                _ => self.partial.push(byte),
            }
            if self.partial.len() >= LINE_MAX {
                self.flush();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
