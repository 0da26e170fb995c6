//! `cp.async.bulk.tensor`: copies a box of a tensor.

use super::bulk::{KNOWN, Multicast, arrive, count};
use super::{Scope, addresses, aligned, in_shared, only};
use crate::lower::Address;
use crate::machine::{Block, CopyChunk, CopyDirection, Fault, Source, Step, Warp, thread};
use crate::ptx::{Instruction, Operand, Space};
use crate::tensor_map::{Form, SIZE, TensorMap};

/// The operands of an instruction.
struct Copy {
    map: Address,
    coordinates: Vec<Source>,
    /// The offset of each dimension between the first and the last, for im2col copies.
    offsets: Vec<Source>,
    shared: Address,
    im2col: bool,
}

pub(super) fn copy(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let ranks = ["1d", "2d", "3d", "4d", "5d"];
    let forms = ["tensor", "tile", "im2col", "im2col_no_offs"];
    only(instruction, &[KNOWN, &ranks, &forms].concat())?;
    let rank = ranks
        .iter()
        .position(|rank| instruction.has(rank))
        .ok_or("no rank")?
        + 1;
    let store = instruction.has("bulk_group");
    let (tensor, memory) = if store { (0, 1) } else { (1, 0) };
    let (map, coordinates) = match instruction.operands.get(tensor) {
        Some(Operand::Tensor(parts)) => match parts.as_slice() {
            [map, Operand::Vector(coordinates)] => (map, coordinates),
            _ => return Err("no coordinates".into()),
        },
        other => return Err(format!("expected a tensor map, found {other:?}")),
    };
    if coordinates.len() != rank {
        return Err(format!(
            "{} coordinates of a tensor of {rank} dimensions",
            coordinates.len()
        ));
    }
    let sources = |list: &[Operand], of_type| {
        let sources = list.iter().map(|operand| scope.source(operand, of_type));
        sources.collect::<Result<Vec<_>, _>>()
    };
    let offsets = match (instruction.has("im2col"), instruction.operands.get(3)) {
        (false, _) => Vec::new(),
        (true, Some(Operand::Vector(list))) if list.len() + 2 == rank => sources(list, "u16")?,
        _ => return Err("the offsets are missing".into()),
    };
    let copy = Copy {
        map: Address {
            base: scope.source(map, "u64")?,
            offset: 0,
        },
        coordinates: sources(coordinates, "s32")?,
        shared: scope.address(instruction, memory)?,
        im2col: instruction.has("im2col") || instruction.has("im2col_no_offs"),
        offsets,
    };
    if store {
        return Ok(Box::new(move |warp, mask, block| {
            let shared = addresses(copy.shared, warp, block);
            for lane in mask.lanes() {
                let pieces = copy.pieces(warp, block, lane, shared[lane], CopyDirection::Out)?;
                count(block, &pieces, true);
                let queue = block.asynchronous.bulk.of(thread(warp, lane));
                pieces.into_iter().for_each(|piece| queue.push(piece));
            }
            Ok(())
        }));
    }
    if !instruction.has("mbarrier::complete_tx::bytes") {
        return Err("neither a group nor an mbarrier".into());
    }
    let barrier = scope.address(instruction, 2)?;
    let multicast = Multicast::new(
        instruction,
        scope,
        3 + usize::from(!copy.offsets.is_empty()),
    )?;
    Ok(Box::new(move |warp, mask, block| {
        let (shared, barriers) = (
            addresses(copy.shared, warp, block),
            addresses(barrier, warp, block),
        );
        multicast.check(warp, block, mask)?;
        for lane in mask.lanes() {
            let pieces = copy.pieces(warp, block, lane, shared[lane], CopyDirection::In)?;
            count(block, &pieces, false);
            arrive(block, lane, barriers[lane], pieces)?;
        }
        Ok(())
    }))
}

impl Copy {
    fn pieces(
        &self,
        warp: &Warp,
        block: &mut Block<'_>,
        lane: usize,
        shared: u64,
        way: CopyDirection,
    ) -> Result<Vec<CopyChunk>, Fault> {
        let map = descriptor(warp, block, lane, addresses(self.map, warp, block)[lane])?;
        let shared = in_shared(lane, Space::Shared, shared)?;
        aligned(lane, Space::Shared, shared, 128)?;
        if map.rank != self.coordinates.len()
            || self.im2col != matches!(map.form, Form::Im2col { .. })
        {
            return Err(Fault::Undefined(format!(
                "a copy that does not fit the tensor map: {map:?}"
            )));
        }
        let value = |source: &Source| source.read(warp, block)[lane];
        let mut at = [0; 5];
        for (at, source) in at.iter_mut().zip(&self.coordinates) {
            *at = i64::from(value(source) as i32);
        }
        let mut offsets = [0; 5];
        for (offset, source) in offsets[1..].iter_mut().zip(&self.offsets) {
            *offset = i64::from(value(source) as u16);
        }
        let pieces = pieces(&map, at, offsets, shared, way);
        pieces
            .iter()
            .try_for_each(|piece| block.check_piece(lane, piece))?;
        Ok(pieces)
    }
}

fn descriptor(
    warp: &Warp,
    block: &mut Block<'_>,
    lane: usize,
    address: u64,
) -> Result<TensorMap, Fault> {
    aligned(lane, Space::Generic, address, 64)?;
    let mut bytes = [0; SIZE];
    for (number, part) in bytes.chunks_exact_mut(16).enumerate() {
        block.read(
            warp,
            lane,
            Space::Generic,
            address + 16 * number as u64,
            part,
        )?;
    }
    TensorMap::decode(&bytes)
        .ok_or_else(|| Fault::Undefined(format!("lane {lane} finds no tensor map at {address:#x}")))
}

/// Returns the chunks that a copy moves, line by line of its box.
fn pieces(
    map: &TensorMap,
    at: [i64; 5],
    offsets: [i64; 5],
    shared: u64,
    way: CopyDirection,
) -> Vec<CopyChunk> {
    let (line, size) = (map.line(), map.element as u64);
    // Swizzling exchanges pieces of 16 bytes.
    let chunk = if map.swizzle > 1 { 16 } else { line };
    let mut pieces = Vec::new();
    let inside = |position: i64, axis: usize| (0..map.sizes[axis] as i64).contains(&position);
    for (number, place) in places(map, at).into_iter().enumerate() {
        let place: [i64; 5] = std::array::from_fn(|axis| place[axis] + offsets[axis]);
        // The part of the line that lies inside the tensor, in bytes.
        let bound = |position: i64| (position.max(0) as u64).min(line / size) * size;
        let (first, end) = if (1..5).all(|axis| inside(place[axis], axis)) {
            (bound(-place[0]), bound(map.sizes[0] as i64 - place[0]))
        } else {
            (0, 0)
        };
        let outer: i64 = (1..5)
            .map(|axis| place[axis] * map.strides[axis] as i64)
            .sum();
        let start = map
            .address
            .wrapping_add_signed(outer + place[0] * size as i64);
        for from in (0..line).step_by(chunk as usize) {
            let to = swizzle(map.swizzle, shared + number as u64 * line + from);
            let (head, tail) = (
                first.clamp(from, from + chunk),
                end.clamp(from, from + chunk),
            );
            let mut push = |way, begin: u64, end: u64| {
                if begin < end {
                    pieces.push(CopyChunk {
                        way,
                        global: start.wrapping_add(begin),
                        shared: to + (begin - from),
                        bytes: (end - begin) as usize,
                    });
                }
            };
            push(way, head, tail);
            // Nothing is stored outside of the tensor.
            if matches!(way, CopyDirection::In) {
                push(CopyDirection::Zero, from, head);
                push(CopyDirection::Zero, tail, from + chunk);
            }
        }
    }
    pieces
}

/// Returns the position of each line of the box in the tensor, in the order of shared memory.
fn places(map: &TensorMap, at: [i64; 5]) -> Vec<[i64; 5]> {
    match map.form {
        Form::Tiled(lengths) => {
            let counts: [u64; 5] =
                std::array::from_fn(|axis| lengths[axis].div_ceil(map.steps[axis]));
            let total = counts[1..].iter().product();
            let place = |mut number: u64| {
                let mut place = at;
                for axis in 1..5 {
                    place[axis] += (number % counts[axis] * map.steps[axis]) as i64;
                    number /= counts[axis];
                }
                place
            };
            (0..total).map(place).collect()
        }
        Form::Im2col {
            lower,
            upper,
            pixels,
            ..
        } => {
            let last = map.rank - 1;
            let mut place = at;
            let next = |_| {
                let here = place;
                // Positions advance like an odometer. The last dimension, the image number, has no limit.
                for axis in 1..=last {
                    place[axis] += map.steps[axis] as i64;
                    if axis == last || place[axis] < map.sizes[axis] as i64 + upper[axis - 1] {
                        break;
                    }
                    place[axis] = lower[axis - 1];
                }
                here
            };
            (0..pixels).map(next).collect()
        }
    }
}

/// Exchanges pieces of 16 bytes within `span` pieces, depending on the index of the 128-byte line.
fn swizzle(span: u64, address: u64) -> u64 {
    address ^ ((address >> 7) & (span - 1)) << 4
}
