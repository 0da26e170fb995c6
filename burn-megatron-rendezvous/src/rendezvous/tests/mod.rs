//! Tests of the registry with simulated time, and of the coordinator and clients over TCP.

mod connections;
mod decisions;
mod scale;
mod untrusted;
