//! The registry with simulated time; coordinator and clients over TCP.

mod connections;
mod decisions;
mod scale;
mod untrusted;
