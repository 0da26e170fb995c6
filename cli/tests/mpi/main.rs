//! Ranks as processes: each test starts real ones, under mpirun or the launcher.

mod mpi_conformance;
mod mpi_faults;
mod mpi_hosts;
mod mpi_restarts;
mod mpi_training;
mod processes;
