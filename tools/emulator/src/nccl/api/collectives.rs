//! The functions for collectives and messages.

use std::ffi::c_int;

use cudarc::driver::sys::CUstream;

use super::report;
use crate::nccl::operation::{Call, Kind};
use crate::nccl::value::{Reduction, Type};
use crate::nccl::{Code, Failure, argument, group};

fn element(number: c_int) -> Result<Type, Failure> {
    Type::of(number).ok_or_else(|| argument(format!("invalid data type {number}")))
}

fn reduction(number: c_int) -> Result<Reduction, Failure> {
    Reduction::of(number).ok_or_else(|| argument(format!("invalid reduction {number}")))
}

fn rank(number: c_int) -> Result<usize, Failure> {
    usize::try_from(number).map_err(|_| argument(format!("invalid rank {number}")))
}

macro_rules! collectives {
    ($($function:ident($($extra:ident),*) = $kind:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $function(
            from: u64,
            to: u64,
            count: usize,
            of: c_int,
            $($extra: c_int,)*
            comm: usize,
            stream: CUstream,
        ) -> Code {
            let make = || {
                let kind = $kind;
                let call = Call { kind, of: element(of)?, count, from, to };
                group::call(comm, stream, call)
            };
            report(stringify!($function), make())
        }
    )*};
}

collectives! {
    ncclAllReduce(op) = Kind::AllReduce(reduction(op)?);
    ncclReduceScatter(op) = Kind::ReduceScatter(reduction(op)?);
    ncclAllGather() = Kind::AllGather;
    ncclBroadcast(root) = Kind::Broadcast { root: rank(root)? };
    ncclReduce(op, root) = Kind::Reduce {
        root: rank(root)?,
        reduction: reduction(op)?,
    };
}

#[unsafe(no_mangle)]
extern "C" fn ncclBcast(
    place: u64,
    count: usize,
    of: c_int,
    root: c_int,
    comm: usize,
    stream: CUstream,
) -> Code {
    ncclBroadcast(place, place, count, of, root, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    from: u64,
    count: usize,
    of: c_int,
    peer: c_int,
    comm: usize,
    stream: CUstream,
) -> Code {
    let make = || {
        let kind = Kind::Send { to: rank(peer)? };
        let (of, to) = (element(of)?, 0);
        let call = Call {
            kind,
            of,
            count,
            from,
            to,
        };
        group::call(comm, stream, call)
    };
    report("ncclSend", make())
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    of: c_int,
    peer: c_int,
    comm: usize,
    stream: CUstream,
) -> Code {
    let make = || {
        let kind = Kind::Receive { from: rank(peer)? };
        let (of, from) = (element(of)?, 0);
        let call = Call {
            kind,
            of,
            count,
            from,
            to,
        };
        group::call(comm, stream, call)
    };
    report("ncclRecv", make())
}
