//! Loads and stores.

#[cfg(test)]
mod tests;

use super::{Address, Lowered, Scope, Target, bits};
use crate::machine::{Access, Action, Block, Fault, Kind, LANES, Lanes, Mask, Source, Step, Warp};
use crate::ptx::{Instruction, Operand, Space};

/// The cache and memory order modifiers of loads and stores. They are ignored, since all accesses are in order.
const IGNORED: &[&str] = &[
    "weak", "volatile", "relaxed", "acquire", "release", "mmio", "cta", "cluster", "gpu", "sys",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified",
];

/// The types of loads and stores.
const TYPES: &[&str] = &[
    "b8", "b16", "b32", "b64", "b128", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32",
    "f64",
];

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let nothing = || Some((Kind::Global, Action::Step(Box::new(|_, _, _| Ok(())))));
    match instruction.name.as_str() {
        "ld" | "ldu" if !instruction.has("async") => load(instruction, scope).map(Some),
        "st" if !instruction.has("async") => store(instruction, scope).map(Some),
        "prefetch" if instruction.has("tensormap") => Ok(None),
        "prefetch" | "prefetchu" | "applypriority" => Ok(nothing()),
        "discard" => discard(instruction, scope).map(Some),
        "createpolicy" => policy(instruction, scope).map(Some),
        _ => Ok(None),
    }
}

/// The operands of a load or a store.
struct Form {
    space: Space,
    of_type: String,
    /// The size of an element in bytes.
    width: usize,
    /// The number of elements.
    count: usize,
    kind: Kind,
}

impl Form {
    fn of(instruction: &Instruction) -> Result<Self, String> {
        let (mut of_type, mut count) = (None, 1);
        for modifier in &instruction.modifiers {
            let word = modifier.as_str();
            match word {
                "v2" | "v4" | "v8" => count = word[1..].parse().unwrap_or(1),
                _ if TYPES.contains(&word) => of_type = Some(word),
                _ if IGNORED.contains(&word) || space_of(word).is_some() => {}
                _ if word.starts_with("L1::") || word.starts_with("L2::") => {}
                _ => return Err(format!(".{word} is not known here")),
            }
        }
        let of_type = of_type.ok_or("it has no type")?.to_owned();
        let space = space(instruction);
        let width = bits(&of_type) as usize / 8;
        if width * count > 32 {
            return Err("more than 32 bytes".into());
        }
        Ok(Self {
            space,
            width,
            count,
            of_type,
            kind: match space {
                Space::Global | Space::Generic => Kind::Global,
                Space::Shared => Kind::Shared,
                Space::Constant | Space::Local | Space::Parameter => Kind::Private,
            },
        })
    }

    /// Reads the elements of an operand. A 128-bit element is in two registers.
    fn elements<T>(
        &self,
        operand: Option<&Operand>,
        each: impl Fn(&Operand) -> Result<(T, Option<T>), String>,
    ) -> Result<Vec<T>, String> {
        let operands = match operand {
            Some(Operand::Vector(parts)) => parts.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        if operands.len() != self.count {
            return Err(format!(
                "{} elements are not {}",
                operands.len(),
                self.count
            ));
        }
        let mut elements = Vec::new();
        for operand in operands {
            let (low, high) = each(operand)?;
            elements.push(low);
            if self.width == 16 {
                elements.push(high.ok_or("128 bits need a register of 128")?);
            }
        }
        Ok(elements)
    }
}

fn space_of(word: &str) -> Option<Space> {
    Some(match word {
        "global" => Space::Global,
        // A cluster has one block.
        "shared" | "shared::cta" | "shared::cluster" => Space::Shared,
        "local" => Space::Local,
        "const" => Space::Constant,
        "param" | "param::entry" => Space::Parameter,
        _ => return None,
    })
}

/// Returns the space of an instruction.
pub(super) fn space(instruction: &Instruction) -> Space {
    let named = instruction.modifiers.iter().find_map(|word| space_of(word));
    named.unwrap_or(Space::Generic)
}

/// Computes the addresses of the lanes.
#[inline]
pub(super) fn addresses(address: Address, warp: &Warp, block: &Block<'_>, at: &mut Lanes) {
    let other;
    let base = match address.base {
        Source::Register(index) => &warp.registers[index],
        Source::Value(base) => return at.fill(base.wrapping_add_signed(address.offset)),
        source => {
            other = source.read(warp, block);
            &other
        }
    };
    for lane in 0..LANES {
        at[lane] = base[lane].wrapping_add_signed(address.offset);
    }
}

/// Returns the `W` bytes at an address as a number.
///
/// # Safety
///
/// `from` must be valid for reading `W` bytes.
#[inline]
pub(super) unsafe fn fetch<const W: usize>(from: *const u8) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: guaranteed by the caller. `W` is at most 8.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), W) };
    u64::from_le_bytes(bytes)
}

/// Writes the lower `W` bytes of a number to an address.
///
/// # Safety
///
/// `to` must be valid for writing `W` bytes.
#[inline]
pub(super) unsafe fn put<const W: usize>(to: *mut u8, value: u64) {
    let bytes = value.to_le_bytes();
    // SAFETY: guaranteed by the caller. `W` is at most 8.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, W) };
}

/// Returns the mask of a register of this width.
pub(super) fn keep(width: u32) -> u64 {
    u64::MAX >> (64 - width.clamp(1, 64))
}

fn load(instruction: &Instruction, scope: &Scope<'_>) -> Result<(Kind, Action), String> {
    let form = Form::of(instruction)?;
    let targets = form.elements(instruction.operands.first(), |operand| {
        Ok(match scope.target(operand)? {
            Target::Data(index, 128) => {
                (Some((index, keep(64))), Some(Some((index + 1, keep(64)))))
            }
            Target::Data(index, width) => (Some((index, keep(width))), None),
            Target::Sink => (None, Some(None)),
            Target::Predicate(_) => return Err("a predicate cannot be loaded".into()),
        })
    })?;
    let load = Load {
        space: form.space,
        address: scope.address(instruction, 1)?,
        bytes: form.width * form.count,
        targets,
    };
    let signed = form.of_type.starts_with('s');
    let step: Step = match (form.width, signed) {
        (1, false) => load.step::<1, false>(),
        (2, false) => load.step::<2, false>(),
        (4, false) => load.step::<4, false>(),
        (1, true) => load.step::<1, true>(),
        (2, true) => load.step::<2, true>(),
        (4, true) => load.step::<4, true>(),
        _ => load.step::<8, false>(),
    };
    Ok((form.kind, Action::Step(step)))
}

struct Load {
    space: Space,
    address: Address,
    /// The size of all elements in bytes.
    bytes: usize,
    /// The register of each element, and the mask of its bits.
    targets: Vec<Option<(usize, u64)>>,
}

impl Load {
    fn step<const W: usize, const SIGNED: bool>(self) -> Step {
        let Self {
            space,
            address,
            bytes,
            targets,
        } = self;
        Box::new(move |warp, mask, block| {
            let mut from = [0; LANES];
            addresses(address, warp, block, &mut from);
            block.reach(warp, mask, space, &mut from, bytes, Access::Read)?;
            for (place, target) in targets.iter().enumerate() {
                let Some((index, keep)) = *target else {
                    continue;
                };
                let value = |lane: usize| {
                    // SAFETY: `reach` has checked all bytes of this lane.
                    let bits = unsafe { fetch::<W>((from[lane] as *const u8).add(place * W)) };
                    let unused = 64 - 8 * W as u32;
                    keep & if SIGNED {
                        ((bits << unused) as i64 >> unused) as u64
                    } else {
                        bits
                    }
                };
                let register = &mut warp.registers[index];
                match mask {
                    Mask::ALL => (0..LANES).for_each(|lane| register[lane] = value(lane)),
                    _ => mask.lanes().for_each(|lane| register[lane] = value(lane)),
                }
            }
            Ok(())
        })
    }
}

fn store(instruction: &Instruction, scope: &Scope<'_>) -> Result<(Kind, Action), String> {
    let form = Form::of(instruction)?;
    if matches!(form.space, Space::Parameter | Space::Constant) {
        return Err("it cannot be written".into());
    }
    let sources = form.elements(instruction.operands.get(1), |operand| {
        let low = scope.source(operand, &form.of_type)?;
        let high = match low {
            Source::Register(index) => Some(Source::Register(index + 1)),
            Source::Predicate(_) => return Err("a predicate cannot be stored".into()),
            _ => None,
        };
        Ok((low, high))
    })?;
    let store = Store {
        space: form.space,
        address: scope.address(instruction, 0)?,
        bytes: form.width * form.count,
        sources,
    };
    let step: Step = match form.width {
        1 => store.step::<1>(),
        2 => store.step::<2>(),
        4 => store.step::<4>(),
        _ => store.step::<8>(),
    };
    Ok((form.kind, Action::Step(step)))
}

struct Store {
    space: Space,
    address: Address,
    /// The size of all elements in bytes.
    bytes: usize,
    /// The source of each element.
    sources: Vec<Source>,
}

impl Store {
    fn step<const W: usize>(self) -> Step {
        let Self {
            space,
            address,
            bytes,
            sources,
        } = self;
        Box::new(move |warp, mask, block| {
            let mut to = [0; LANES];
            addresses(address, warp, block, &mut to);
            block.reach(warp, mask, space, &mut to, bytes, Access::Write)?;
            for (place, source) in sources.iter().enumerate() {
                let other;
                let values = match source {
                    Source::Register(index) => &warp.registers[*index],
                    _ => {
                        other = source.read(warp, block);
                        &other
                    }
                };
                if block.compares(space) {
                    compare::<W>(warp, mask, block, &to, (place * W, values))?;
                }
                let write = |lane: usize| {
                    // SAFETY: `reach` has checked all bytes of this lane.
                    unsafe { put::<W>((to[lane] as *mut u8).add(place * W), values[lane]) };
                };
                match mask {
                    Mask::ALL => (0..LANES).for_each(write),
                    _ => mask.lanes().for_each(write),
                }
            }
            Ok(())
        })
    }
}

/// Checks whether other warps have stored different values at these addresses.
fn compare<const W: usize>(
    warp: &Warp,
    mask: Mask,
    block: &mut Block<'_>,
    to: &Lanes,
    (offset, values): (usize, &Lanes),
) -> Result<(), Fault> {
    for lane in mask.lanes() {
        let address = to[lane] + offset as u64;
        // SAFETY: `reach` has checked all bytes of this lane.
        let before = unsafe { fetch::<W>(address as *const u8) };
        let differs = before != values[lane] & keep(8 * W as u32);
        block.compare(warp, address, differs)?;
    }
    Ok(())
}

/// Lowers `discard`: the memory has no defined value until it is written again.
fn discard(instruction: &Instruction, scope: &Scope<'_>) -> Result<(Kind, Action), String> {
    let address = scope.address(instruction, 0)?;
    let space = space(instruction);
    if scope.at(instruction, 1, "u32")? != Source::Value(128) {
        return Err("only 128 bytes can be discarded".into());
    }
    let step: Step = Box::new(move |warp, mask, block| {
        let mut to = [0; LANES];
        addresses(address, warp, block, &mut to);
        block.reach(warp, mask, space, &mut to, 128, Access::Write)?;
        for lane in mask.lanes() {
            // SAFETY: `reach` has checked all bytes of this lane.
            unsafe { (to[lane] as *mut u8).write_bytes(0xff, 128) };
        }
        Ok(())
    });
    Ok((Kind::Global, Action::Step(step)))
}

/// Lowers cache policies, which have no effect: the emulator has no cache.
fn policy(instruction: &Instruction, scope: &Scope<'_>) -> Result<(Kind, Action), String> {
    let (index, _) = scope.result(instruction)?;
    let step: Step = Box::new(move |warp, mask, _| {
        mask.lanes()
            .for_each(|lane| warp.registers[index][lane] = 0);
        Ok(())
    });
    Ok((Kind::Move, Action::Step(step)))
}
