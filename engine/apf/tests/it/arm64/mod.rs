//! The two guest ABIs of arm64.

mod abort;
mod calls;
mod events;
mod mock;
mod model;
mod sdei;
mod state;
