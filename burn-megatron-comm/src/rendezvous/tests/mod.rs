//! The registry with simulated time; coordinator, relays and clients over TCP.

mod connections;
mod decisions;
mod relays;
mod scale;
mod untrusted;
