//! Reads the values of a tensor, which are stored as floats, as FP8 with a scale per block, or as MXFP4.

use burn_megatron::checkpoint::{CheckpointError, ElementType, HeaderEntry, TensorSlice};
use burn_megatron::kernels::fp8::{Format, e8m0};
use half::bf16;
use safetensors::Dtype;

use super::mapping::{WeightEncoding, WeightMapping};
use super::shard::{ShardFile, StoredTensors, element_type};

/// The number of rows and columns of a block of FP8 values with a common scale.
const BLOCK: usize = 128;
/// The number of MXFP4 values with a common scale.
const GROUP: usize = 32;

/// The location of a tensor: its file, its offset and its shape.
#[derive(Clone, Debug)]
struct Place {
    shard: usize,
    begin: u64,
    shape: Vec<usize>,
    /// The size of an element, in bytes.
    size: usize,
}

/// The values of a tensor.
#[derive(Clone, Debug)]
pub(super) struct StoredValues {
    /// The dtype of the decoded values.
    pub dtype: ElementType,
    values: Place,
    scales: Scales,
}

/// The scales of the stored values.
#[derive(Clone, Debug)]
enum Scales {
    None,
    /// One scale per block of [`BLOCK`] x [`BLOCK`] values.
    Blocks(Place),
    /// One scale per [`GROUP`] values of a row.
    Groups(Place),
}

/// Returns the names of the tensors with the codes and the scales of MXFP4 values.
pub(crate) fn mxfp4_names(name: &str) -> [String; 2] {
    ["blocks", "scales"].map(|what| format!("{name}_{what}"))
}

/// Returns the name of the tensor with the scales of FP8 values.
fn fp8_scales(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Returns the names of the tensors that a mapping requires.
pub(super) fn names(mapping: &WeightMapping) -> Vec<String> {
    match mapping.encoding {
        WeightEncoding::Floats => vec![mapping.name.clone()],
        WeightEncoding::Mxfp4 => mxfp4_names(&mapping.name).into(),
    }
}

/// Finds tensors among the tensors that are not assigned yet.
pub(super) struct Finder<'a> {
    /// The name of the folder, which error messages show.
    pub of: String,
    pub shards: &'a [ShardFile],
    pub found: &'a StoredTensors,
}

impl Finder<'_> {
    /// Finds the stored values of a mapping.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] if a tensor is missing, has another shape, or has an unsupported dtype.
    pub fn values(&self, mapping: &WeightMapping) -> Result<StoredValues, CheckpointError> {
        let WeightMapping { name, shape, .. } = mapping;
        if mapping.encoding == WeightEncoding::Mxfp4 {
            return self.mxfp4(name, shape);
        }
        let (shard, entry) = self.entry(name, shape)?;
        let scales = match entry.dtype {
            Dtype::F8_E4M3 => self.fp8_blocks(name, shape)?,
            _ => Scales::None,
        };
        let dtype = match scales {
            Scales::None => element_type(entry.dtype),
            _ => Some(ElementType::Bf16),
        };
        let fits = "F64, F32, F16 or BF16, or a matrix of F8_E4M3";
        let dtype = dtype.ok_or_else(|| self.wrong_type(name, shard, entry, fits))?;
        Ok(StoredValues {
            dtype,
            values: place(shard, entry),
            scales,
        })
    }

    /// Returns the scales of an FP8 matrix of shape `[rows, columns]`.
    fn fp8_blocks(&self, name: &str, shape: &[usize]) -> Result<Scales, CheckpointError> {
        let scales = fp8_scales(name);
        let blocks: Vec<_> = shape.iter().map(|size| size.div_ceil(BLOCK)).collect();
        if shape.len() != 2 {
            let what = format!(
                "{name} has elements of F8_E4M3 and the shape {shape:?}: expected a matrix"
            );
            return Err(CheckpointError::corrupt(self.of.as_str(), what));
        }
        let (shard, entry) = self.entry(&scales, &blocks)?;
        if !matches!(entry.dtype, Dtype::F32 | Dtype::BF16) {
            return Err(self.wrong_type(&scales, shard, entry, "F32 or BF16"));
        }
        Ok(Scales::Blocks(place(shard, entry)))
    }

    fn mxfp4(&self, name: &str, shape: &[usize]) -> Result<StoredValues, CheckpointError> {
        let [codes, scales] = mxfp4_names(name);
        let (columns, outer) = shape.split_last().unwrap_or((&0, &[]));
        if !columns.is_multiple_of(GROUP) {
            let what = format!(
                "{name} has rows of {columns} values in MXFP4: expected a multiple of {GROUP}"
            );
            return Err(CheckpointError::corrupt(self.of.as_str(), what));
        }
        let groups = [outer, &[columns / GROUP]].concat();
        let bytes = |name: &str, shape: &[usize]| match self.entry(name, shape)? {
            (shard, entry) if entry.dtype == Dtype::U8 => Ok(place(shard, entry)),
            (shard, entry) => Err(self.wrong_type(name, shard, entry, "U8")),
        };
        let codes = bytes(&codes, &[&groups[..], &[GROUP / 2]].concat())?;
        Ok(StoredValues {
            dtype: ElementType::Bf16,
            // A byte holds two values.
            values: Place {
                shape: [outer, &[columns / 2]].concat(),
                ..codes
            },
            scales: Scales::Groups(bytes(&scales, &groups)?),
        })
    }

    fn entry(
        &self,
        name: &str,
        wanted: &[usize],
    ) -> Result<(usize, &HeaderEntry), CheckpointError> {
        let of = self.of.clone();
        match self.found.get(name) {
            None => Err(CheckpointError::missing(of, name)),
            Some((_, entry)) if entry.shape != wanted => Err(CheckpointError::Shape {
                of,
                key: name.into(),
                found: entry.shape.clone(),
                wanted: wanted.to_vec(),
            }),
            Some((shard, entry)) => Ok((*shard, entry)),
        }
    }

    fn wrong_type(
        &self,
        name: &str,
        shard: usize,
        entry: &HeaderEntry,
        fits: &str,
    ) -> CheckpointError {
        let what = format!("{name} has elements of {}: expected {fits}", entry.dtype);
        CheckpointError::corrupt(self.shards[shard].path(), what)
    }
}

fn place(shard: usize, entry: &HeaderEntry) -> Place {
    let elements: usize = entry.shape.iter().product();
    Place {
        shard,
        begin: entry.begin,
        shape: entry.shape.clone(),
        size: entry.size as usize / elements.max(1),
    }
}

impl Place {
    /// Reads a slice.
    fn read(&self, shards: &[ShardFile], slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; slice.len() * self.size];
        for run in slice.runs(&self.shape) {
            let range = run.in_slice * self.size..(run.in_slice + run.len) * self.size;
            let at = self.begin + (run.in_tensor * self.size) as u64;
            shards[self.shard].read(&mut bytes[range], at)?;
        }
        Ok(bytes)
    }
}

impl StoredValues {
    /// Returns the names of the tensors that store the values. The caller removes these names from the list of
    /// unassigned tensors.
    pub fn names(&self, mapping: &WeightMapping) -> Vec<String> {
        let mut names = names(mapping);
        if let Scales::Blocks(_) = self.scales {
            names.push(fp8_scales(&mapping.name));
        }
        names
    }

    /// Returns the index of the file with the values.
    pub fn shard(&self) -> usize {
        self.values.shard
    }

    /// Reads a slice of the values, in the layout of the file.
    pub fn read(
        &self,
        shards: &[ShardFile],
        slice: &TensorSlice,
    ) -> Result<Vec<u8>, CheckpointError> {
        match &self.scales {
            Scales::None => self.values.read(shards, slice),
            Scales::Blocks(scales) => self.read_fp8(shards, scales, slice),
            Scales::Groups(scales) => self.read_mxfp4(shards, scales, slice),
        }
    }

    fn read_fp8(
        &self,
        shards: &[ShardFile],
        scales: &Place,
        slice: &TensorSlice,
    ) -> Result<Vec<u8>, CheckpointError> {
        let codes = self.values.read(shards, slice)?;
        let blocks = grouped(slice, &[BLOCK, BLOCK]);
        let is_bf16 = scales.size == 2;
        let scales = scales.read(shards, &blocks)?;
        let scales: Vec<f32> = match is_bf16 {
            true => scales
                .as_chunks()
                .0
                .iter()
                .map(|x| bf16::from_le_bytes(*x).to_f32())
                .collect(),
            false => scales
                .as_chunks()
                .0
                .iter()
                .map(|x| f32::from_le_bytes(*x))
                .collect(),
        };
        let table: [f32; 256] = std::array::from_fn(|code| Format::E4M3.decode(code as u8));
        let mut values = Vec::with_capacity(2 * codes.len());
        for (row, codes) in codes.chunks_exact(slice.shape[1]).enumerate() {
            let row = (slice.offset[0] + row) / BLOCK - blocks.offset[0];
            let scales = &scales[row * blocks.shape[1]..];
            for (column, code) in codes.iter().enumerate() {
                let column = (slice.offset[1] + column) / BLOCK - blocks.offset[1];
                let value = bf16::from_f32(table[usize::from(*code)] * scales[column]);
                values.extend(value.to_le_bytes());
            }
        }
        Ok(values)
    }

    fn read_mxfp4(
        &self,
        shards: &[ShardFile],
        scales: &Place,
        slice: &TensorSlice,
    ) -> Result<Vec<u8>, CheckpointError> {
        let last = slice.shape.len() - 1;
        let mut divisors = vec![1; last + 1];
        divisors[last] = 2;
        let pairs = grouped(slice, &divisors);
        let codes = self.values.read(shards, &pairs)?;
        divisors[last] = GROUP;
        let groups = grouped(slice, &divisors);
        let scales = scales.read(shards, &groups)?;
        let columns = slice.range(last);
        let (pairs, groups) = (pairs.range(last), groups.range(last));
        let rows = codes
            .chunks_exact(pairs.len())
            .zip(scales.chunks_exact(groups.len()));
        let mut values = Vec::with_capacity(2 * slice.len());
        for (codes, scales) in rows {
            for column in columns.clone() {
                let code = codes[column / 2 - pairs.start] >> (4 * (column % 2));
                let scale = e8m0::decode(scales[column / GROUP - groups.start]);
                let value = bf16::from_f32(Format::E2M1.decode(code) * scale);
                values.extend(value.to_le_bytes());
            }
        }
        Ok(values)
    }
}

/// Converts a slice of elements to the slice of groups that contain them. `sizes` contains the size of a group for each
/// dimension.
fn grouped(slice: &TensorSlice, sizes: &[usize]) -> TensorSlice {
    let mut groups = slice.clone();
    for (dim, size) in sizes.iter().enumerate() {
        let range = slice.range(dim);
        groups.offset[dim] = range.start / size;
        groups.shape[dim] = range.end.div_ceil(*size) - groups.offset[dim];
    }
    groups
}
