//! Asynchronous copies, and the barriers at which they arrive.
//!
//! The rules of copies are in [`machine`](crate::machine::Asynchronous). A cluster always has one block, so the
//! shared memory of the cluster is the shared memory of this block.

mod bulk;
mod mbarrier;
mod phase;
mod reduce;
mod simple;
mod tensor;
#[cfg(test)]
mod tests;

use super::{Address, Lowered, Scope, Target};
use crate::machine::{Action, Block, Fault, Kind, Lanes, Source, Special, Wait, Warp, resolve};
use crate::ptx::{Instruction, Space};

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let has = |name| instruction.has(name);
    Ok(match instruction.name.as_str() {
        "mbarrier" => Some((Kind::Control, mbarrier::lower(instruction, scope)?)),
        "cp" if has("async") => {
            if instruction.modifiers.iter().any(|name| name == "bulk") {
                bulk::lower(instruction, scope)?
            } else {
                Some(simple::lower(instruction, scope)?)
            }
        }
        "barrier" if has("cluster") => Some((Kind::Control, cluster_barrier(instruction)?)),
        "mapa" | "getctarank" => Some((Kind::Integer, other_block(instruction, scope)?)),
        "prefetch" if has("tensormap") => Some((Kind::Control, nothing())),
        // These instructions only affect the overlap of grids and the number of registers, which the emulator does
        // not model.
        "griddepcontrol" | "setmaxnreg" => Some((Kind::Control, nothing())),
        _ => None,
    })
}

/// Returns the value of a special register of clusters. A cluster has one block.
pub(super) fn cluster(name: &str) -> Option<Source> {
    let (name, axis) = match name.split_once('.') {
        Some((name, axis)) => (name, "xyz".find(axis)?),
        None => (name, 0),
    };
    match name {
        "clusterid" => Some(Source::Special(Special::Block(axis))),
        "nclusterid" => Some(Source::Special(Special::Blocks(axis))),
        "cluster_ctaid" | "cluster_ctarank" | "is_explicit_cluster" => Some(Source::Value(0)),
        "cluster_nctaid" | "cluster_nctarank" => Some(Source::Value(1)),
        _ => None,
    }
}

fn nothing() -> Action {
    Action::Step(Box::new(|_, _, _| Ok(())))
}

/// Lowers `barrier.cluster`. All threads of the block arrive at barrier 0 when they wait.
fn cluster_barrier(instruction: &Instruction) -> Result<Action, String> {
    match instruction.modifiers.get(1).map(String::as_str) {
        Some("arrive") => Ok(nothing()),
        Some("wait") => Ok(Action::Barrier {
            number: Source::Value(0),
            threads: None,
            wait: Wait::Sync,
        }),
        other => Err(format!("barrier.cluster.{other:?}")),
    }
}

/// Lowers `mapa` and `getctarank`. Only the block itself is valid.
fn other_block(instruction: &Instruction, scope: &Scope<'_>) -> Result<Action, String> {
    let (target, _) = scope.result(instruction)?;
    if instruction.name == "getctarank" {
        return Ok(Action::Step(Box::new(move |warp, mask, _| {
            mask.lanes()
                .for_each(|lane| warp.registers[target][lane] = 0);
            Ok(())
        })));
    }
    let (address, rank) = (
        scope.at(instruction, 1, "u64")?,
        scope.at(instruction, 2, "u32")?,
    );
    Ok(Action::Step(Box::new(move |warp, mask, block| {
        let (addresses, ranks) = (address.read(warp, block), rank.read(warp, block));
        for lane in mask.lanes() {
            if ranks[lane] != 0 {
                let rank = ranks[lane];
                return Err(Fault::Undefined(format!(
                    "block {rank} of a cluster of one"
                )));
            }
            warp.registers[target][lane] = addresses[lane];
        }
        Ok(())
    })))
}

/// Returns the addresses of an operand in brackets.
fn addresses(address: Address, warp: &Warp, block: &Block<'_>) -> Lanes {
    let base = address.base.read(warp, block);
    base.map(|base| base.wrapping_add_signed(address.offset))
}

/// Returns the shared memory address of an address in `space`. Fails for other memory.
fn in_shared(lane: usize, space: Space, address: u64) -> Result<u64, Fault> {
    match resolve(space, address) {
        (Space::Shared, address) => Ok(address),
        (other, _) => Err(Fault::Undefined(format!(
            "lane {lane} names {address:#x} of {other:?} memory where shared memory must be"
        ))),
    }
}

/// Returns the global memory address of an address in `space`. Fails for other memory.
fn in_global(lane: usize, space: Space, address: u64) -> Result<u64, Fault> {
    match resolve(space, address) {
        (Space::Global, address) => Ok(address),
        (other, _) => Err(Fault::Undefined(format!(
            "lane {lane} names {address:#x} of {other:?} memory where global memory must be"
        ))),
    }
}

/// Returns shared memory if a modifier names it, and otherwise the generic space.
fn shared_or_any(instruction: &Instruction) -> Space {
    if instruction
        .modifiers
        .iter()
        .any(|name| name.starts_with("shared"))
    {
        Space::Shared
    } else {
        Space::Generic
    }
}

fn aligned(lane: usize, space: Space, address: u64, bytes: usize) -> Result<(), Fault> {
    if address.is_multiple_of(bytes as u64) {
        Ok(())
    } else {
        Err(Fault::Misaligned {
            lane,
            space,
            address,
            bytes,
        })
    }
}

/// Refuses modifiers that are not in the list.
fn only(instruction: &Instruction, known: &[&str]) -> Result<(), String> {
    let is_known = |modifier: &&String| known.contains(&modifier.as_str());
    match instruction
        .modifiers
        .iter()
        .find(|modifier| !is_known(modifier))
    {
        Some(modifier) => Err(format!(".{modifier} is not known here")),
        None => Ok(()),
    }
}
