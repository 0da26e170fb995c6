//! The registry with simulated time, and coordinator and clients over TCP.

mod connections;
mod decisions;
mod untrusted;
