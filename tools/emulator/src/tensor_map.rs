//! Tensor maps (`CUtensorMap`): descriptors of tensors in global memory for bulk copies.
//!
//! The specification defines only their size, 128 bytes. The driver encodes them and instructions read them. This
//! module defines the format for both.

/// The size of a tensor map in bytes.
pub const SIZE: usize = 128;
/// The first bytes of a tensor map.
const MARK: [u8; 4] = *b"TMap";

/// A tensor in global memory, and the box that one instruction copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// The address of the tensor.
    pub address: u64,
    /// The number of dimensions, 1 to 5.
    pub rank: usize,
    /// The size of an element in bytes.
    pub element: usize,
    /// The number of elements in each dimension. The contiguous dimension is first.
    pub sizes: [u64; 5],
    /// The stride of each dimension in bytes.
    pub strides: [u64; 5],
    /// The element stride of each dimension: every `n`th element is copied.
    pub steps: [u64; 5],
    /// The swizzle of 16-byte pieces of a box in shared memory: the number of pieces, 1, 2, 4 or 8.
    pub swizzle: u64,
    /// The elements that are copied.
    pub form: Form,
}

/// Selects the elements that an instruction copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A box with the given number of elements in each dimension.
    Tiled([u64; 5]),
    /// Pixels in the order of a convolution.
    Im2col {
        /// The first pixel in each of up to three dimensions, relative to the beginning of the tensor.
        lower: [i64; 3],
        /// The last pixel, relative to the end of the tensor.
        upper: [i64; 3],
        /// The number of channels per pixel.
        channels: u64,
        /// The number of pixels.
        pixels: u64,
    },
}

/// An argument that the driver does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a tensor map's {0} is out of its range")]
pub struct Invalid(pub &'static str);

/// The common arguments of `cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col`. Enumerators are numbers, as in the
/// driver.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The element type, `CUtensorMapDataType`.
    pub data_type: u32,
    /// The address of the tensor.
    pub address: u64,
    /// The number of elements in each dimension.
    pub sizes: &'a [u64],
    /// The strides in bytes of all dimensions except the first.
    pub strides: &'a [u64],
    /// The element strides.
    pub steps: &'a [u32],
    /// `CUtensorMapInterleave`. Only no interleaving is supported.
    pub interleave: u32,
    /// `CUtensorMapSwizzle`: none, 32, 64 or 128 bytes.
    pub swizzle: u32,
    /// `CUtensorMapFloatOOBfill`. Only zeros are supported.
    pub fill: u32,
}

/// Encodes a tiled tensor map, as `cuTensorMapEncodeTiled` does.
///
/// # Errors
///
/// Refuses arguments that the driver refuses, and arguments that are not supported.
pub fn encode_tiled(tensor: &Tensor<'_>, lengths: &[u32]) -> Result<[u8; SIZE], Invalid> {
    let mut map = common(tensor)?;
    if lengths.len() != map.rank || lengths.iter().any(|length| !(1..=256).contains(length)) {
        return Err(Invalid("box"));
    }
    let mut of = [1; 5];
    of.iter_mut()
        .zip(lengths)
        .for_each(|(of, length)| *of = (*length).into());
    map.form = Form::Tiled(of);
    map.checked().map(|map| map.encode())
}

/// Encodes an im2col tensor map, as `cuTensorMapEncodeIm2col` does.
///
/// # Errors
///
/// The same as for [`encode_tiled`].
pub fn encode_im2col(
    tensor: &Tensor<'_>,
    lower: &[i32],
    upper: &[i32],
    channels: u32,
    pixels: u32,
) -> Result<[u8; SIZE], Invalid> {
    let mut map = common(tensor)?;
    let spatial = map
        .rank
        .checked_sub(2)
        .filter(|count| *count > 0)
        .ok_or(Invalid("rank"))?;
    let corner = |from: &[i32]| {
        // 16, 8 and 5 bits per dimension, for one, two and three dimensions.
        let limit = [1 << 15, 1 << 7, 1 << 4][spatial - 1];
        let fits =
            from.len() == spatial && from.iter().all(|value| (-limit..limit).contains(value));
        let mut corner = [0; 3];
        corner
            .iter_mut()
            .zip(from)
            .for_each(|(to, from)| *to = i64::from(*from));
        if fits {
            Ok(corner)
        } else {
            Err(Invalid("corner"))
        }
    };
    if !(1..=256).contains(&channels) || !(1..=1024).contains(&pixels) {
        return Err(Invalid("channels or pixels"));
    }
    map.form = Form::Im2col {
        lower: corner(lower)?,
        upper: corner(upper)?,
        channels: channels.into(),
        pixels: pixels.into(),
    };
    map.checked().map(|map| map.encode())
}

fn common(tensor: &Tensor<'_>) -> Result<TensorMap, Invalid> {
    let rank = tensor.sizes.len();
    if !(1..=5).contains(&rank) {
        return Err(Invalid("rank"));
    }
    let element = match tensor.data_type {
        0 => 1,
        1 | 6 | 9 => 2,
        // TF32 numbers are copied unchanged, since the products that read them truncate them. The types that flush
        // subnormal numbers (10 and 12) are not supported.
        2 | 3 | 7 | 11 => 4,
        4 | 5 | 8 => 8,
        _ => return Err(Invalid("data type")),
    };
    let (mut sizes, mut strides, mut steps) = ([1; 5], [0; 5], [1; 5]);
    for (size, of) in sizes.iter_mut().zip(tensor.sizes) {
        *size = *of;
    }
    strides[0] = element as u64;
    if tensor.strides.len() != rank - 1 || tensor.steps.len() != rank {
        return Err(Invalid("rank"));
    }
    for (stride, of) in strides[1..].iter_mut().zip(tensor.strides) {
        *stride = *of;
    }
    // The first dimension has no element stride.
    for (step, of) in steps.iter_mut().zip(tensor.steps).skip(1) {
        *step = u64::from(*of);
    }
    if tensor.steps.iter().any(|step| !(1..=8).contains(step)) {
        return Err(Invalid("element stride"));
    }
    if sizes.iter().any(|size| !(1..=1 << 32).contains(size)) {
        return Err(Invalid("size"));
    }
    let bad = |stride: &u64| !stride.is_multiple_of(16) || *stride >= 1 << 40;
    if strides[1..].iter().any(bad) {
        return Err(Invalid("stride"));
    }
    if !tensor.address.is_multiple_of(16) {
        return Err(Invalid("address"));
    }
    if (tensor.interleave, tensor.fill) != (0, 0) {
        return Err(Invalid("interleave or fill"));
    }
    Ok(TensorMap {
        address: tensor.address,
        rank,
        element,
        sizes,
        strides,
        steps,
        swizzle: match tensor.swizzle {
            swizzle @ 0..=3 => 1 << swizzle,
            _ => return Err(Invalid("swizzle")),
        },
        form: Form::Tiled([1; 5]),
    })
}

impl TensorMap {
    /// Returns the length of a line of the box in bytes. A line is contiguous in global and in shared memory.
    pub fn line(&self) -> u64 {
        let elements = match self.form {
            Form::Tiled(lengths) => lengths[0],
            Form::Im2col { channels, .. } => channels,
        };
        elements * self.element as u64
    }

    fn checked(self) -> Result<Self, Invalid> {
        let line = self.line();
        let swizzled = self.swizzle == 1 || line <= 16 * self.swizzle;
        if line.is_multiple_of(16) && swizzled {
            Ok(self)
        } else {
            Err(Invalid("inner length"))
        }
    }

    /// Encodes the tensor map.
    pub fn encode(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        let (lengths, corners, pixels) = match self.form {
            Form::Tiled(lengths) => (lengths, [0; 6], 0),
            Form::Im2col {
                lower,
                upper,
                channels,
                pixels,
            } => {
                let [a, b, c] = lower;
                let [d, e, f] = upper;
                ([channels, 1, 1, 1, 1], [a, b, c, d, e, f], pixels)
            }
        };
        let mut at = 0;
        let mut put = |value: &[u8]| {
            bytes[at..at + value.len()].copy_from_slice(value);
            at += value.len();
        };
        put(&MARK);
        put(&[self.rank as u8, self.element as u8, self.swizzle as u8, 0]);
        put(&self.address.to_le_bytes());
        self.strides
            .iter()
            .for_each(|stride| put(&stride.to_le_bytes()));
        // A size of 2^32 does not fit. It is stored as 0, which no dimension has.
        self.sizes
            .iter()
            .for_each(|size| put(&((size - 1) as u32).to_le_bytes()));
        lengths
            .iter()
            .for_each(|length| put(&(*length as u16).to_le_bytes()));
        self.steps.iter().for_each(|step| put(&[*step as u8]));
        put(&[0]);
        corners
            .iter()
            .for_each(|corner| put(&(*corner as i16).to_le_bytes()));
        put(&(pixels as u16).to_le_bytes());
        bytes
    }

    /// Decodes a tensor map. Returns `None` if the bytes are not a tensor map.
    pub fn decode(bytes: &[u8; SIZE]) -> Option<Self> {
        let mut rest = &bytes[..];
        if take::<4>(&mut rest) != MARK {
            return None;
        }
        let [rank, element, swizzle, _] = take::<4>(&mut rest);
        let address = u64::from_le_bytes(take(&mut rest));
        let strides = std::array::from_fn(|_| u64::from_le_bytes(take(&mut rest)));
        let sizes = std::array::from_fn(|_| u64::from(u32::from_le_bytes(take(&mut rest))) + 1);
        let lengths: [u64; 5] = std::array::from_fn(|_| u16::from_le_bytes(take(&mut rest)).into());
        let steps = std::array::from_fn(|_| u64::from(take::<1>(&mut rest)[0]));
        take::<1>(&mut rest);
        let corners: [i64; 6] = std::array::from_fn(|_| i16::from_le_bytes(take(&mut rest)).into());
        let [a, b, c, d, e, f] = corners;
        let pixels = u16::from_le_bytes(take(&mut rest));
        Some(Self {
            address,
            rank: rank.into(),
            element: element.into(),
            sizes,
            strides,
            steps,
            swizzle: swizzle.into(),
            form: match pixels {
                0 => Form::Tiled(lengths),
                _ => Form::Im2col {
                    lower: [a, b, c],
                    upper: [d, e, f],
                    channels: lengths[0],
                    pixels: pixels.into(),
                },
            },
        })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let mut taken = [0; N];
    let (first, others) = rest.split_at(N.min(rest.len()));
    taken[..first.len()].copy_from_slice(first);
    *rest = others;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME: Tensor<'_> = Tensor {
        data_type: 6,
        address: 4096,
        sizes: &[100, 1 << 32, 7],
        strides: &[208, 1 << 30],
        steps: &[1, 2, 1],
        interleave: 0,
        swizzle: 3,
        fill: 0,
    };

    #[test]
    fn a_map_comes_back_from_its_bytes() -> Result<(), Invalid> {
        let map = TensorMap::decode(&encode_tiled(&SOME, &[64, 256, 3])?).expect("a map");
        assert_eq!(map.form, Form::Tiled([64, 256, 3, 1, 1]));
        assert_eq!(
            (map.address, map.rank, map.element, map.swizzle),
            (4096, 3, 2, 8)
        );
        assert_eq!(map.sizes, [100, 1 << 32, 7, 1, 1]);
        assert_eq!(map.strides, [2, 208, 1 << 30, 0, 0]);
        assert_eq!((map.steps, map.line()), ([1, 2, 1, 1, 1], 128));
        assert_eq!(TensorMap::decode(&map.encode()), Some(map));
        let map = encode_im2col(&SOME, &[-1], &[-3], 32, 1024)?;
        let form = Form::Im2col {
            lower: [-1, 0, 0],
            upper: [-3, 0, 0],
            channels: 32,
            pixels: 1024,
        };
        assert_eq!(TensorMap::decode(&map).map(|map| map.form), Some(form));
        assert_eq!(TensorMap::decode(&[0; SIZE]), None);
        Ok(())
    }

    #[test]
    fn what_the_driver_refuses_is_refused() {
        let tiled = |tensor: Tensor<'_>| encode_tiled(&tensor, &[64, 1, 1]).map(|_| ());
        assert_eq!(tiled(SOME), Ok(()));
        assert_eq!(
            tiled(Tensor { address: 8, ..SOME }),
            Err(Invalid("address"))
        );
        assert_eq!(
            tiled(Tensor {
                strides: &[200, 16],
                ..SOME
            }),
            Err(Invalid("stride"))
        );
        assert_eq!(
            tiled(Tensor {
                steps: &[1, 9, 1],
                ..SOME
            }),
            Err(Invalid("element stride"))
        );
        assert_eq!(
            tiled(Tensor {
                sizes: &[0, 1, 1],
                ..SOME
            }),
            Err(Invalid("size"))
        );
        assert_eq!(
            tiled(Tensor {
                data_type: 13,
                ..SOME
            }),
            Err(Invalid("data type"))
        );
        assert_eq!(
            tiled(Tensor { fill: 1, ..SOME }),
            Err(Invalid("interleave or fill"))
        );
        assert_eq!(
            tiled(Tensor { swizzle: 2, ..SOME }),
            Err(Invalid("inner length"))
        );
        assert_eq!(
            tiled(Tensor { swizzle: 4, ..SOME }),
            Err(Invalid("swizzle"))
        );
        assert!(encode_tiled(&SOME, &[64, 257, 1]).is_err());
        assert!(encode_tiled(&SOME, &[4, 1, 1]).is_err());
        assert!(encode_im2col(&SOME, &[1, 1], &[0, 0], 8, 8).is_err());
        assert!(encode_im2col(&SOME, &[1], &[0], 8, 1025).is_err());
    }
}
