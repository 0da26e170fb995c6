//! `cp.async.bulk`: large copies by a single thread.

use super::reduce::combine;
use super::simple::number;
use super::tensor;
use super::{Lowered, Scope, addresses, aligned, in_global, in_shared, nothing, only};
use crate::machine::{
    Action, Arrival, Block, CopyChunk, CopyDirection, Fault, Kind, LANES, Lanes, Mask, Source,
    Step, Warp, thread,
};
use crate::ptx::{Instruction, Space};

/// Modifiers for the source, the destination and the kind of copy.
pub(super) const KNOWN: &[&str] = &[
    "async",
    "bulk",
    "shared::cluster",
    "shared::cta",
    "global",
    "mbarrier::complete_tx::bytes",
    "bulk_group",
    "L2::cache_hint",
    "multicast::cluster",
];

/// The mask operand of a multicast copy to shared memory.
#[derive(Clone, Copy)]
pub(super) struct Multicast(Option<Source>);

impl Multicast {
    /// Reads the optional mask of blocks from the operand at `place`.
    pub fn new(instruction: &Instruction, scope: &Scope<'_>, place: usize) -> Result<Self, String> {
        let mask = instruction.has("multicast::cluster");
        let mask = mask
            .then(|| scope.at(instruction, place, "u16"))
            .transpose()?;
        Ok(Self(mask))
    }

    /// Checks that the mask contains only this block.
    pub fn check(self, warp: &Warp, block: &Block<'_>, mask: Mask) -> Result<(), Fault> {
        let blocks = self.0.map_or([1; LANES], |blocks| blocks.read(warp, block));
        if mask.lanes().all(|lane| blocks[lane] == 1) {
            Ok(())
        } else {
            Err(Fault::Undefined(
                "a copy to other blocks of a cluster of one".into(),
            ))
        }
    }
}

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let modifiers: Vec<_> = instruction.modifiers.iter().map(String::as_str).collect();
    let reduce = modifiers.contains(&"reduce");
    let action = match modifiers.as_slice() {
        ["async", "bulk", "commit_group"] => Action::Step(Box::new(|warp, mask, block| {
            for lane in mask.lanes() {
                block.asynchronous.bulk.of(thread(warp, lane)).commit();
            }
            Ok(())
        })),
        ["async", "bulk", "wait_group"] => {
            let pending = number(instruction, 0)?;
            Action::Step(Box::new(move |warp, mask, block| {
                mask.lanes()
                    .try_for_each(|lane| block.wait_bulk(warp, lane, pending))
            }))
        }
        ["async", "bulk", "wait_group", "read"] => {
            let pending = number(instruction, 0)?;
            Action::Step(Box::new(move |warp, mask, block| {
                mask.lanes()
                    .try_for_each(|lane| block.wait_read(warp, lane, pending))
            }))
        }
        ["async", "bulk", "prefetch", ..] => nothing(),
        names if names.contains(&"tensor") => {
            return Ok(Some((
                Kind::Global,
                Action::Step(tensor::copy(instruction, scope)?),
            )));
        }
        names if reduce || names.contains(&"bulk_group") => {
            return Ok(Some((
                Kind::Global,
                Action::Step(store(instruction, scope)?),
            )));
        }
        names if names.contains(&"mbarrier::complete_tx::bytes") && names.contains(&"global") => {
            return Ok(Some((
                Kind::Global,
                Action::Step(load(instruction, scope)?),
            )));
        }
        _ => return Ok(None),
    };
    Ok(Some((Kind::Control, action)))
}

/// Lowers a copy from global to shared memory.
fn load(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    only(instruction, KNOWN)?;
    let (to, from) = (
        scope.address(instruction, 0)?,
        scope.address(instruction, 1)?,
    );
    let (size, barrier) = (
        scope.at(instruction, 2, "u32")?,
        scope.address(instruction, 3)?,
    );
    let multicast = Multicast::new(instruction, scope, 4)?;
    Ok(Box::new(move |warp, mask, block| {
        let (to, from) = (addresses(to, warp, block), addresses(from, warp, block));
        let (sizes, barriers) = (size.read(warp, block), addresses(barrier, warp, block));
        multicast.check(warp, block, mask)?;
        for lane in mask.lanes() {
            let piece = piece(lane, CopyDirection::In, to[lane], from[lane], sizes[lane])?;
            block.check_piece(lane, &piece)?;
            count(block, &[piece], false);
            arrive(block, lane, barriers[lane], vec![piece])?;
        }
        Ok(())
    }))
}

/// Lowers a copy from shared to global memory.
fn store(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let way = combine(instruction)?;
    let (to, from) = (
        scope.address(instruction, 0)?,
        scope.address(instruction, 1)?,
    );
    let size = scope.at(instruction, 2, "u32")?;
    Ok(Box::new(move |warp, mask, block| {
        let (to, from) = (addresses(to, warp, block), addresses(from, warp, block));
        let sizes = size.read(warp, block);
        for lane in mask.lanes() {
            let piece = piece(lane, way, from[lane], to[lane], sizes[lane])?;
            block.check_piece(lane, &piece)?;
            count(block, &[piece], true);
            block.asynchronous.bulk.of(thread(warp, lane)).push(piece);
        }
        Ok(())
    }))
}

fn piece(
    lane: usize,
    way: CopyDirection,
    shared: u64,
    global: u64,
    size: u64,
) -> Result<CopyChunk, Fault> {
    let shared = in_shared(lane, Space::Shared, shared)?;
    let global = in_global(lane, Space::Global, global)?;
    aligned(lane, Space::Shared, shared, 16)?;
    aligned(lane, Space::Global, global, 16)?;
    let bytes = size as u32 as usize;
    if bytes.is_multiple_of(16) {
        Ok(CopyChunk {
            way,
            global,
            shared,
            bytes,
        })
    } else {
        Err(Fault::Undefined(format!(
            "lane {lane} copies {bytes} bytes, which is not a multiple of 16"
        )))
    }
}

/// Registers copies at the barrier at an address. The barrier is updated when the copies are done.
pub(super) fn arrive(
    block: &mut Block<'_>,
    lane: usize,
    barrier: u64,
    pieces: Vec<CopyChunk>,
) -> Result<(), Fault> {
    let barrier = in_shared(lane, Space::Shared, barrier)?;
    aligned(lane, Space::Shared, barrier, 8)?;
    let bytes = pieces.iter().map(|piece| piece.bytes as u32).sum();
    block.asynchronous.polls = 0;
    let arrivals = block.asynchronous.arrivals.entry(barrier).or_default();
    arrivals.push(Arrival::Bytes(pieces, bytes));
    Ok(())
}

/// Counts the accesses to shared and global memory. Lines are counted like lanes that access one sector each.
pub(super) fn count(block: &mut Block<'_>, pieces: &[CopyChunk], store: bool) {
    block.count_shared_bytes(pieces.iter().map(|piece| piece.bytes).sum());
    for piece in pieces
        .iter()
        .filter(|piece| !matches!(piece.way, CopyDirection::Zero))
    {
        let end = piece.global + piece.bytes as u64;
        let mut at = piece.global;
        while at < end {
            let left = (end - at) as usize;
            let (size, lanes) = if left < 32 {
                (left, 1)
            } else {
                (32, (left / 32).min(LANES))
            };
            let starts: Lanes = std::array::from_fn(|lane| at + (lane * size) as u64);
            block.count_global(&starts, Mask(u32::MAX >> (LANES - lanes)), size, store);
            at += (lanes * size) as u64;
        }
    }
}
