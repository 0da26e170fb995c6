//! Tests with ranks as processes. Each test starts real processes under mpirun or the launcher.

mod mpi_conformance;
mod mpi_faults;
mod mpi_hosts;
mod mpi_restarts;
mod mpi_training;
mod processes;
