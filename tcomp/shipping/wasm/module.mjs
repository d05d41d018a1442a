// $NAME: a neural network as a WebAssembly module, compiled by $PRODUCER. For Node and for pages; one thread.
//
//   import { load } from "./$NAME.mjs";
//   const model = await load();
//   const outputs = model.run({ $EXAMPLE });
//
// See $NAME.d.ts for the tensors. A model is code: use it only if you trust who made it.

const MODEL = $MODEL;

const ARRAYS = {
  bool: Uint8Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array, float32: Float32Array, float64: Float64Array, float16: Uint16Array, bfloat16: Uint16Array,
  complex64: Float32Array, complex128: Float64Array,
};
const arrayOf = (dtype) => ARRAYS[dtype] ?? Uint8Array; // types narrower than a byte take one each
const valuesOf = (dtype) => (dtype.startsWith("complex") ? 2 : 1);
const align = (n) => Math.ceil(n / 64) * 64;
const PAGE = 65536;
const LIMIT = 65536 * PAGE; // what 32 bits address

async function bytesOf(source) {
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return source;
  const url = new URL(source, import.meta.url);
  if (url.protocol === "file:") return (await import("node:fs/promises")).readFile(url);
  const response = await fetch(url);
  if (!response.ok) throw new Error(`$NAME: ${url} cannot be read: status ${response.status}`);
  return response.arrayBuffer();
}

/** Loads the model. `code` and `weights` are URLs or bytes; by default the files beside this one. */
export async function load({ code = "./$NAME.wasm", weights = "./$NAME.weights" } = {}) {
  const [program, constants] = await Promise.all([bytesOf(code), MODEL.weights ? bytesOf(weights) : new ArrayBuffer(0)]);
  if (constants.byteLength !== MODEL.weights)
    throw new Error(`$NAME: the weights have ${constants.byteLength} bytes instead of ${MODEL.weights}: they are those of another model`);
  const { instance } = await WebAssembly.instantiate(program, {});
  return new Model(instance.exports, constants);
}

class Model {
  #wasm;
  #weights; // addresses
  #call;
  #free; // where memory begins that every run plans anew
  #plans = new Map(); // by sizes, where no values of inputs decide

  constructor(wasm, weights) {
    this.#wasm = wasm;
    this.inputs = MODEL.inputs;
    this.outputs = MODEL.outputs;
    const extents = MODEL.outputs.reduce((count, output) => count + output.shape.length, 0);
    this.#weights = align(wasm.__heap_base.value);
    this.#call = align(this.#weights + MODEL.weights);
    // A call (nine words of 64 bits), the pointers to inputs and to outputs, dims, sizes.
    const words = 9 + MODEL.inputs.length + MODEL.outputs.length + MODEL.dims.length + 1 + extents;
    this.#free = align(this.#call + 8 * words);
    this.#reserve(this.#free);
    const bytes = ArrayBuffer.isView(weights) ? new Uint8Array(weights.buffer, weights.byteOffset, weights.byteLength) : new Uint8Array(weights);
    new Uint8Array(wasm.memory.buffer, this.#weights, MODEL.weights).set(bytes);
  }

  /** Runs the model: typed arrays, or { data, dims }, by the names of inputs -> { data, dims } by the names of outputs. */
  run(feeds) {
    const { tensors, sizes } = this.#given(feeds);
    const plan = this.#plan(tensors, sizes);
    tensors.forEach(({ data }, n) => new data.constructor(this.#wasm.memory.buffer, plan.inputs[n], data.length).set(data));
    const view = this.#write(plan);
    const status = this.#wasm.tcomp_run(this.#call);
    if (status) throw new Error(`$NAME: ${this.#reason(status, view)}`);
    const shapes = MODEL.counted ? this.#shapes(this.#places(), "the sizes that the run found") : plan.shapes;
    return Object.fromEntries(MODEL.outputs.map(({ name, dtype }, n) => {
      const count = shapes[n].reduce((product, extent) => product * extent, valuesOf(dtype));
      return [name, { data: new (arrayOf(dtype))(this.#wasm.memory.buffer, plan.outputs[n], count).slice(), dims: shapes[n] }];
    }));
  }

  #given(feeds) {
    const unknown = Object.keys(feeds).filter((name) => !MODEL.inputs.some((input) => input.name === name));
    if (unknown.length) throw new TypeError(`$NAME: there is no input ${unknown[0]}, only ${MODEL.inputs.map((input) => input.name).join(", ")}`);
    const sizes = MODEL.dims.map((dim) => (dim.late ? -1 : dim.given ? null : 0));
    const tensors = MODEL.inputs.map(({ name, dtype, shape }) => {
      const fed = feeds[name];
      if (fed === undefined) throw new TypeError(`$NAME: the input ${name} is missing`);
      const data = ArrayBuffer.isView(fed) ? fed : fed.data;
      const dims = ArrayBuffer.isView(fed) ? shape : fed.dims;
      const kind = arrayOf(dtype);
      if (!(data instanceof kind)) throw new TypeError(`$NAME: the input ${name}, of ${dtype}, must be a ${kind.name}`);
      if (!Array.isArray(dims) || dims.length !== shape.length || !dims.every((extent) => Number.isInteger(extent) && extent >= 0))
        throw new TypeError(`$NAME: the input ${name} has free sizes: give { data, dims } with the extents of [${shape.join(", ")}]`);
      shape.forEach((extent, axis) => {
        const number = typeof extent === "string" ? MODEL.dims.findIndex((dim) => dim.name === extent) : -1;
        if (number < 0 ? extent !== dims[axis] : sizes[number] !== null && sizes[number] !== dims[axis])
          throw new RangeError(`$NAME: the input ${name} has the extents [${dims.join(", ")}] instead of [${shape.join(", ")}]`);
        if (number >= 0) sizes[number] = dims[axis];
      });
      const count = dims.reduce((product, extent) => product * extent, valuesOf(dtype));
      if (data.length !== count) throw new RangeError(`$NAME: the input ${name} has ${data.length} values instead of ${count}`);
      return { data, dims };
    });
    MODEL.dims.forEach(({ name, min, max, given }, n) => {
      if (given && (sizes[n] < min || (max !== null && sizes[n] > max)))
        throw new RangeError(`$NAME: ${name} is ${sizes[n]}, and must be at least ${min}${max === null ? "" : ` and at most ${max}`}`);
    });
    return { tensors, sizes };
  }

  // Where the words behind the call lie.
  #places() {
    const inputs = this.#call + 72, outputs = inputs + 8 * MODEL.inputs.length;
    const dims = outputs + 8 * MODEL.outputs.length;
    return { inputs, outputs, dims, sizes: dims + 8 * MODEL.dims.length };
  }

  // The memory of a run: inputs, workspace, outputs.
  #plan(tensors, sizes) {
    const key = sizes.join();
    const known = this.#plans.get(key);
    if (known) return known;
    const at = this.#places();
    const bound = MODEL.binds;
    const view = new DataView(this.#wasm.memory.buffer);
    sizes.forEach((size, n) => view.setBigInt64(at.dims + 8 * n, BigInt(size), true));
    let end = this.#free;
    const take = (bytes) => {
      const place = end;
      end = align(end + bytes);
      return place;
    };
    const inputs = tensors.map(({ data }) => take(data.byteLength));
    if (bound) {
      this.#reserve(end);
      tensors.forEach(({ data }, n) => new data.constructor(this.#wasm.memory.buffer, inputs[n], data.length).set(data));
      const fresh = new DataView(this.#wasm.memory.buffer);
      inputs.forEach((place, n) => fresh.setUint32(at.inputs + 4 * n, place, true));
      const refused = this.#wasm.tcomp_bind(at.inputs, at.dims);
      if (refused) throw new RangeError(`$NAME: ${MODEL.dims[refused - 1].what} would be ${fresh.getBigInt64(at.dims + 8 * (refused - 1), true)}`);
    }
    const shapes = this.#shapes(at, "these sizes");
    const workspace = take(Number(new DataView(this.#wasm.memory.buffer).getBigInt64(at.sizes, true)));
    const outputs = shapes.map((shape, n) => take(this.#bytes(MODEL.outputs[n].dtype, shape)));
    this.#reserve(end);
    const now = new DataView(this.#wasm.memory.buffer);
    const dims = sizes.map((_, n) => now.getBigInt64(at.dims + 8 * n, true));
    const plan = { inputs, outputs, workspace, shapes, dims };
    if (!bound) this.#plans.set(key, plan);
    return plan;
  }

  #bytes(dtype, shape) {
    return shape.reduce((product, extent) => product * extent, valuesOf(dtype) * arrayOf(dtype).BYTES_PER_ELEMENT);
  }

  // The extents of outputs, by the function of the model that knows them.
  #shapes(at, what) {
    this.#wasm.tcomp_plan(at.dims, at.sizes);
    const view = new DataView(this.#wasm.memory.buffer);
    const bytes = view.getBigInt64(at.sizes, true);
    if (bytes === -1n) throw new RangeError(`$NAME: ${what} are too small for the model`);
    if (bytes === -2n) throw new RangeError(`$NAME: ${what} are too large`);
    if (bytes < 0n) throw new RangeError(`$NAME: ${MODEL.checks[-3 - Number(bytes)]}`);
    let n = 1;
    return MODEL.outputs.map(({ shape }) => shape.map(() => Number(view.getBigInt64(at.sizes + 8 * n++, true))));
  }

  // The call: pointers take the lower half of its words.
  #write(plan) {
    const view = new DataView(this.#wasm.memory.buffer);
    const at = this.#places();
    plan.inputs.forEach((place, n) => view.setUint32(at.inputs + 4 * n, place, true));
    plan.outputs.forEach((place, n) => view.setUint32(at.outputs + 4 * n, place, true));
    plan.dims.forEach((size, n) => view.setBigInt64(at.dims + 8 * n, size, true));
    [at.inputs, at.outputs, this.#weights, plan.workspace, at.dims, 0, 0, 0, 0].forEach((word, n) => view.setBigInt64(this.#call + 8 * n, BigInt(word), true));
    return view;
  }

  #reason(status, view) {
    const [index, extent] = [7, 8].map((n) => view.getBigInt64(this.#call + 8 * n, true));
    const message = MODEL.errors[status - 1] ?? `status ${status}`;
    return extent ? `${message} (index ${index} of ${extent})` : message;
  }

  #reserve(end) {
    const missing = end - this.#wasm.memory.buffer.byteLength;
    if (end > LIMIT) throw new RangeError(`$NAME: a run with these sizes needs ${end} bytes, more than WebAssembly addresses`);
    if (missing > 0) this.#wasm.memory.grow(Math.ceil(missing / PAGE));
  }
}
