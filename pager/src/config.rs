//! The settings of a pager.

use crate::state::StateFolder;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Takes a message for the user. It is called with a lock held, so it does not wait.
pub type Report = Arc<dyn Fn(&str) + Send + Sync>;

/// What a VM gets when it needs a page that the source has lost. No choice provides zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenLost {
    /// The thread waits until the VM is ended from outside.
    Hold,
    /// The VMM's process is ended by SIGKILL.
    Kill,
    /// The page is poisoned: each access gets `SIGBUS`, as for memory with an uncorrectable error.
    /// Before Linux 6.6 the thread waits.
    #[default]
    Poison,
}

/// The settings of a pager.
#[derive(Clone)]
pub struct Config {
    /// After this time almost without processor time a VM is idle, and its pages go to the host's
    /// swap. At least a second; `None`: never.
    pub cold_after: Option<Duration>,
    /// How long a VMM may take for its message.
    pub patience: Duration,
    /// Takes messages: refused connections, lost pages.
    pub report: Report,
    /// What the next pager needs to serve this pager's VMs. Without it, the VMs of a killed pager
    /// wait for ever.
    pub state: Option<Arc<StateFolder>>,
}

/// Idle VMs stay in memory, a VMM's message may take five seconds, messages for the user go to
/// `tracing` alone, and nothing is left to the next pager.
impl Default for Config {
    fn default() -> Self {
        Self {
            cold_after: None,
            patience: Duration::from_secs(5),
            report: Arc::new(|_| {}),
            state: None,
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cold_after,
            patience,
            report: _,
            state: _,
        } = self;
        let mut debug = f.debug_struct("Config");
        debug.field("cold_after", cold_after);
        debug.field("patience", patience).finish_non_exhaustive()
    }
}
