// The one place that names the view library.
import htm from "../../vendor/htm.mjs";
import { h } from "../../vendor/preact.mjs";

export { Component, createContext, render } from "../../vendor/preact.mjs";
export { useCallback, useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/hooks.mjs";

/** Markup as tagged templates, without a build step. What is put in is text, never HTML. */
export const html = htm.bind(h);

let count = 0;

/** A new id for an element, so that labels and descriptions can point to it. */
export const newId = (prefix = "id") => `${prefix}-${++count}`;

/** Joins the class names that are not empty. @param {...(string|false|null|undefined)} names */
export const classes = (...names) => names.filter(Boolean).join(" ");
